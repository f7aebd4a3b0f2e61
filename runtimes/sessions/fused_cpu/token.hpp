// Attention for a step of one token: the ring is read once, from the oldest visible token to the newest.
#pragma once

#include <cmath>
#include <type_traits>

#include "pack.hpp"

namespace xl {

/// scores[c] = query · column c of a table [width, columns], which is read once from beginning to end, times
/// the column's scale where there are scales.
template <int NV, class Number>
__attribute__((noinline)) void score_columns(const vec (&query)[NV], const Number* table, int64_t columns,
                                             const float* scales, float* scores) {
  constexpr int TOGETHER = 4;  // rows of the table that one pass over the scores adds
  float queries[NV * LANES];
  for (int v = 0; v < NV; ++v) store(queries + v * LANES, query[v]);
  std::fill_n(scores, columns, 0.0f);
  for (int k = 0; k < NV * LANES; k += TOGETHER) {
    const Number *r0 = table + k * columns, *r1 = r0 + columns, *r2 = r1 + columns, *r3 = r2 + columns;
    const float* q = queries + k;
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES)
      store(scores + c, load(scores + c) + (q[0] * load(r0 + c) + q[1] * load(r1 + c)) +
                            (q[2] * load(r2 + c) + q[3] * load(r3 + c)));
    for (; c < columns; ++c)
      scores[c] +=
          q[0] * widened(r0[c]) + q[1] * widened(r1[c]) + q[2] * widened(r2[c]) + q[3] * widened(r3[c]);
  }
  if (scales)
    for (int64_t c = 0; c < columns; ++c) scores[c] *= scales[c];
}

/// The answer of one query, whose width is NV vectors, summed over chunks of keys by an online softmax.
template <int NV>
class TokenAnswer {
 public:
  static constexpr int CHUNK = BLOCK;  // keys that are scored before their values are read

  /// Adds `count` keys and values (at most CHUNK), which lie `pitch` apart; 0 repeats one of them. scores: of
  /// their distances, in whole vectors that end with minus infinity. key_scales: of bytes, with as many
  /// numbers. For the rest see `add_scored`.
  template <class Number>
  __attribute__((noinline)) void add(const vec (&query)[NV], const Number* key, const Number* value,
                                     int64_t pitch, int64_t count, float* scores, const float* key_scales,
                                     const float* value_scales, const float* gates) {
    for (int64_t i = 0; i < count; i += LANES) {  // the last vector may pass the end: it repeats the last key
      const Number* keys[LANES];
      for (int lane = 0; lane < LANES; ++lane) keys[lane] = key + std::min(i + lane, count - 1) * pitch;
      vec x[LANES] = {};
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; ++lane) x[lane] += load(keys[lane] + v * LANES) * query[v];
      vec products = sums(x);
      if (std::is_same_v<Number, int8_t>) products *= load(key_scales + i);
      store(scores + i, products + load(scores + i));
    }
    add_scored(scores, value, pitch, count, value_scales, gates);
  }

  /// Adds `count` values with these scores, which become weights. value_scales: of bytes. gates: factors of
  /// the weights, in whole vectors, or null.
  template <class Number>
  __attribute__((noinline)) void add_scored(float* scores, const Number* value, int64_t pitch, int64_t count,
                                            const float* value_scales, const float* gates) {
    vec highest = all(NO_SCORE);
    for (int64_t i = 0; i < count; i += LANES) highest = larger(highest, load(scores + i));
    // Where a score exceeds all before it, what was summed so far is scaled down to it.
    const float top = std::max(most_, largest(highest));
    if (top > most_) {
      const float factor = std::exp2(most_ - top);
      for (int v = 0; v < NV; ++v) sum_[v] *= factor;
      total_ *= factor, ungated_ *= factor, most_ = top;
    }
    vec weight_sums = vec{}, ungated = vec{};
    for (int64_t i = 0; i < count; i += LANES) {
      vec weight = exp2_of(load(scores + i) - top);
      ungated += weight;
      if (gates) weight *= load(gates + i);
      store(scores + i, weight);
      weight_sums += weight;
    }
    total_ += sum(weight_sums), ungated_ += sum(ungated);
    vec total[NV];  // a copy, which stays in registers
    std::copy_n(sum_, NV, total);
    for (int64_t i = 0; i < count; ++i) {
      const float weight = std::is_same_v<Number, int8_t> ? scores[i] * value_scales[i] : scores[i];
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) total[v] += weight * load(value + i * pitch + v * LANES);
    }
    std::copy_n(total, NV, sum_);
  }

  /// Writes the answer; a query that sees no key answers zero.
  void write(float epsilon, float* out) const {
    const float factor = most_ > NO_SCORE ? 1 / (total_ + epsilon * ungated_) : 0;
    for (int v = 0; v < NV; ++v) store(out + v * LANES, sum_[v] * factor);
  }

 private:
  vec sum_[NV] = {};
  float most_ = NO_SCORE;          // the largest score
  float total_ = 0, ungated_ = 0;  // the sum of the weights, and of those before the gate
};

/// The answer of a step's only query, whose width is NV vectors.
template <int NV, class Stored>
__attribute__((noinline)) void attend_token(const Head<Stored>& head, const Rule& rule, Scratch& scratch) {
  constexpr int CHUNK = TokenAnswer<NV>::CHUNK;
  const int64_t pitch = head.ring_pitch;
  vec plain_query[NV], content_query[NV], position_query[NV];
  for (int v = 0; v < NV; ++v) {
    const vec q = load(head.query + v * LANES);
    plain_query[v] = q * LOG2E;
    content_query[v] = (head.u ? q + load(head.u + v * LANES) : q) * LOG2E;
    position_query[v] = (head.v ? q + load(head.v + v * LANES) : q) * LOG2E;
  }
  const bool by_position = head.table || head.bias;
  const int64_t vectors = (head.persistent + LANES - 1) / LANES * LANES;
  float* scores = scratch.take(vectors + (by_position ? head.rows : 0));
  TokenAnswer<NV> answer;
  head.persistent_keys.as([&](auto* keys) {
    score_columns(plain_query, keys, head.persistent, head.persistent_key_scales, scores);
  });
  std::fill(scores + head.persistent, scores + vectors, -INFINITY);
  head.persistent_values.as([&](auto* values) {
    for (int64_t n = 0; n < head.persistent; n += CHUNK)
      answer.add_scored(scores + n, values + n * head.width, head.width,
                        std::min<int64_t>(CHUNK, head.persistent - n), from(head.persistent_value_scales, n),
                        nullptr);
  });
  float* by_distance = by_position ? scores + vectors : nullptr;
  head.table.as([&](auto* table) {
    score_columns(position_query, table, head.rows, head.table_scales, by_distance);
  });
  if (head.bias)
    for (int64_t d = 0; d < head.rows; ++d)
      by_distance[d] = (head.table ? by_distance[d] : 0) + head.bias[d] * LOG2E;
  // Each turn takes slots that lie side by side: it ends where the ring does, and where the stream begins.
  for (int64_t distance = head.longest_distance(rule, 0); distance >= rule.nearest;) {
    const bool before = head.initial_key && distance > head.position;
    const int64_t slot = head.slot(-distance);
    const int64_t of_one_kind = before ? distance - std::max<int64_t>(head.position, -1) : head.slots - slot;
    const int64_t count = std::min<int64_t>({CHUNK, distance - rule.nearest + 1, of_one_kind});
    float of_distance[CHUNK], gates[CHUNK], key_scales[CHUNK];
    std::fill_n(of_distance, count, 0.0f);
    if (by_distance) pack_distances(by_distance, 1, head.rows, distance, of_distance);
    if (head.gate) pack_distances(head.gate, 1, head.rows, distance, gates);
    for (int64_t i = count; i % LANES; ++i) of_distance[i] = -INFINITY, gates[i] = key_scales[i] = 0;
    if (before) {
      answer.add(content_query, head.initial_key, head.initial_value, 0, count, of_distance, nullptr, nullptr,
                 head.gate ? gates : nullptr);
    } else {
      if (head.key_scales) std::copy_n(head.key_scales + slot, count, key_scales);
      answer.add(content_query, head.keys + slot * pitch, head.values + slot * pitch, pitch, count,
                 of_distance, key_scales, from(head.value_scales, slot), head.gate ? gates : nullptr);
    }
    distance -= count;
  }
  answer.write(rule.epsilon, head.out);
}

}  // namespace xl
