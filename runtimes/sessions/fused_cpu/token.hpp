// Attention for a step of one token: each ring is read once, its keys before its values.
#pragma once

#include <cmath>
#include <type_traits>

#include "pack.hpp"

namespace xl {

constexpr int MAX_STREAMS = 4;  // that one reading of a head's position table serves
constexpr int READ_PLACES = 4;  // see `add_scores`

/// scores [streams, columns] = queries · columns of a table [width, columns], times the columns' scales where there
/// are scales. The table is read once from beginning to end. Rows of scores are `scores_pitch` apart.
template <int NV, class Number>
__attribute__((noinline)) void score_columns(const vec (*queries)[NV], int64_t streams, const Number* table,
                                             int64_t columns, const float* scales, float* scores,
                                             int64_t scores_pitch) {
  constexpr int TOGETHER = 4, WIDTH = NV * LANES;  // rows of the table that one pass over the scores adds
  float numbers[MAX_STREAMS][WIDTH];
  for (int64_t s = 0; s < streams; ++s) {
    for (int v = 0; v < NV; ++v) store(numbers[s] + v * LANES, queries[s][v]);
    std::fill_n(scores + s * scores_pitch, columns, 0.0f);
  }
  for (int k = 0; k < WIDTH; k += TOGETHER) {
    const Number* row[TOGETHER];
    for (int i = 0; i < TOGETHER; ++i) row[i] = table + (k + i) * columns;
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) {
      const vec r0 = load(row[0] + c), r1 = load(row[1] + c), r2 = load(row[2] + c), r3 = load(row[3] + c);
      for (int64_t s = 0; s < streams; ++s) {
        const float* q = numbers[s] + k;
        float* score = scores + s * scores_pitch + c;
        store(score, load(score) + (q[0] * r0 + q[1] * r1) + (q[2] * r2 + q[3] * r3));
      }
    }
    for (; c < columns; ++c)
      for (int64_t s = 0; s < streams; ++s)
        for (int i = 0; i < TOGETHER; ++i) scores[s * scores_pitch + c] += numbers[s][k + i] * widened(row[i][c]);
  }
  for (int64_t s = 0; scales && s < streams; ++s)
    for (int64_t c = 0; c < columns; ++c) scores[s * scores_pitch + c] *= scales[c];
}

/// Adds query · key to the scores of `count` keys, which lie `pitch` apart; 0 repeats one of them.
///
/// Keys and values are read at READ_PLACES places in turns: the processor fetches ahead within a page, and so from
/// several pages at once.
template <int NV, class Number>
__attribute__((noinline)) void add_scores(const vec (&query)[NV], const Number* keys, int64_t pitch, int64_t count,
                                          const float* scales, float* scores) {
  constexpr int SIDE = LANES / READ_PLACES;  // keys at each place that a vector of scores covers
  const int64_t part = count / LANES * SIDE;
  for (int64_t i = 0; i < part; i += SIDE) {
    vec x[LANES] = {};
    const Number* at = keys + i * pitch;
#pragma GCC unroll 4
    for (int side = 0; side < SIDE; ++side)
#pragma GCC unroll 4
      for (int place = 0; place < READ_PLACES; ++place)
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v)
          x[place * SIDE + side] += load(at + (place * part + side) * pitch + v * LANES) * query[v];
    float products[LANES];
    store(products, sums(x));
    for (int place = 0; place < READ_PLACES; ++place)
      for (int side = 0; side < SIDE; ++side) {
        const int64_t key = place * part + i + side;
        const float product = products[place * SIDE + side];
        scores[key] += std::is_same_v<Number, int8_t> ? product * scales[key] : product;
      }
  }
  for (int64_t i = part * READ_PLACES; i < count; ++i) {
    vec x{};
    for (int v = 0; v < NV; ++v) x += load(keys + i * pitch + v * LANES) * query[v];
    scores[i] += std::is_same_v<Number, int8_t> ? sum(x) * scales[i] : sum(x);
  }
}

/// Adds weight · value to `total` for `count` values, which lie `pitch` apart; 0 repeats one of them.
template <int NV, class Number>
__attribute__((noinline)) void add_values(const float* weights, const Number* values, int64_t pitch, int64_t count,
                                          const float* scales, vec (&total)[NV]) {
  const int64_t part = count / READ_PLACES;
  vec own[NV];  // a copy, which stays in registers
  std::copy_n(total, NV, own);
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    const float weight = std::is_same_v<Number, int8_t> ? weights[i] * scales[i] : weights[i];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) own[v] += weight * load(values + i * pitch + v * LANES);
  };
  for (int64_t i = 0; i < part; ++i)
#pragma GCC unroll 4
    for (int place = 0; place < READ_PLACES; ++place) add(place * part + i);
  for (int64_t i = part * READ_PLACES; i < count; ++i) add(i);
  std::copy_n(own, NV, total);
}

/// The answer of a step's only query, whose width is NV vectors.
///
/// by_distance: the scores of positions [rows], or null. scores: working memory of one float for each
/// persistent vector and visible key, and BLOCK_TOKENS more.
template <int NV, class Stored>
void attend_token(const Head<Stored>& head, const Rule& rule, const float* by_distance, float* scores) {
  vec plain_query[1][NV], content_query[NV];
  for (int v = 0; v < NV; ++v) {
    const vec q = load(head.query + v * LANES);
    plain_query[0][v] = q * LOG2E;
    content_query[v] = (head.u ? q + load(head.u + v * LANES) : q) * LOG2E;
  }
  const int64_t longest = head.longest_distance(rule, 0);
  const int64_t seen = std::max<int64_t>(longest - rule.nearest + 1, 0), count = head.persistent + seen;
  float* of_keys = scores + head.persistent;  // from the oldest
  // Calls work(i, keys, values, pitch, slot, here) for keys i … i + here - 1, which lie side by side: a run ends
  // where the ring does, and where the stream begins.
  const auto for_runs = [&](const auto& work) {
    for (int64_t i = 0, here; i < seen; i += here) {
      const int64_t distance = longest - i, slot = head.slot(-distance), pitch = head.ring_pitch;
      if (head.initial_key && distance > head.position) {
        here = std::min(seen - i, distance - std::max<int64_t>(head.position, -1));
        work(i, head.initial_key, head.initial_value, 0, 0, here);
      } else {
        here = std::min(seen - i, head.slots - slot);
        work(i, head.keys + slot * pitch, head.values + slot * pitch, pitch, slot, here);
      }
    }
  };

  head.persistent_keys.as([&](auto* keys) {
    score_columns(plain_query, 1, keys, head.persistent, head.persistent_key_scales, scores, 0);
  });
  if (!by_distance) std::fill_n(of_keys, seen, 0.0f);
  for (int64_t i = 0; by_distance && i < seen; i += BLOCK_TOKENS)
    pack_distances(by_distance, 1, head.rows, longest - i, of_keys + i);
  for_runs([&](int64_t i, auto* keys, auto*, int64_t pitch, int64_t slot, int64_t here) {
    add_scores(content_query, keys, pitch, here, from(head.key_scales, slot), of_keys + i);
  });

  for (int64_t i = count; i % LANES; ++i) scores[i] = -INFINITY;
  vec highest = all(NO_SCORE);
  for (int64_t i = 0; i < count; i += LANES) highest = larger(highest, load(scores + i));
  const float top = std::max(NO_SCORE, largest(highest));
  for (int64_t i = 0; i < count; i += LANES) store(scores + i, exp2_of(load(scores + i) - top));
  const auto sum_of_weights = [&] {
    vec total{};
    for (int64_t i = 0; i < count; i += LANES) total += load(scores + i);
    return sum(total);
  };
  float total = sum_of_weights();
  if (head.gate) {
    for (int64_t i = 0; i < seen; ++i) of_keys[i] *= head.gate[std::min(longest - i, head.rows - 1)];
    total = sum_of_weights() + rule.epsilon * total;
  }

  vec answer[NV] = {};
  head.persistent_values.as([&](auto* values) {
    add_values(scores, values, head.width, head.persistent, head.persistent_value_scales, answer);
  });
  for_runs([&](int64_t i, auto*, auto* values, int64_t pitch, int64_t slot, int64_t here) {
    add_values(of_keys + i, values, pitch, here, from(head.value_scales, slot), answer);
  });
  const float factor = top > NO_SCORE ? 1 / total : 0;  // a query that sees no key answers zero
  for (int v = 0; v < NV; ++v) store(head.out + v * LANES, answer[v] * factor);
}

/// The answers of a step's only query in several streams (at most MAX_STREAMS), of one head.
template <int NV, class Stored>
__attribute__((noinline)) void attend_tokens(const Head<Stored>* heads, int64_t streams, const Rule& rule,
                                             Scratch& scratch) {
  const Head<Stored>& head = *heads;
  const int64_t rows = head.table || head.bias ? whole_vectors(head.rows) : 0;
  float* by_distance = scratch.take(streams * rows + head.persistent + rule.mem_len + 1 + 2 * BLOCK_TOKENS);
  vec queries[MAX_STREAMS][NV];
  for (int64_t s = 0; s < streams; ++s)
    for (int v = 0; v < NV; ++v) {
      const vec q = load(heads[s].query + v * LANES);
      queries[s][v] = (head.v ? q + load(head.v + v * LANES) : q) * LOG2E;
    }
  head.table.as([&](auto* table) {
    score_columns(queries, streams, table, head.rows, head.table_scales, by_distance, rows);
  });
  if (head.bias)
    for (int64_t s = 0; s < streams; ++s)
      for (int64_t d = 0; d < head.rows; ++d)
        by_distance[s * rows + d] = (head.table ? by_distance[s * rows + d] : 0) + head.bias[d] * LOG2E;
  for (int64_t s = 0; s < streams; ++s)
    attend_token<NV>(heads[s], rule, rows ? by_distance + s * rows : nullptr, by_distance + streams * rows);
}

}  // namespace xl
