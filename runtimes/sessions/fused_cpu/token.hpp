// Attention for a step of one token: the ring is read once, from the oldest visible token to the newest.
#pragma once

#include <cmath>

#include "head.hpp"

namespace xl {

/// position_query · r(d) + bias(d) for every row d of the table, which is read once from beginning to end.
template <int NV, class Stored, class Tabled>
inline const float* score_table(const Head<Stored>& head, const Tabled* table,
                                const vec (&position_query)[NV], Scratch& scratch) {
  constexpr int TOGETHER = 4;  // columns of the head that one pass over the scores adds
  float *by_distance = scratch.take(head.rows), queries[NV * LANES];
  for (int v = 0; v < NV; ++v) store(queries + v * LANES, position_query[v]);
  for (int64_t d = 0; d < head.rows; ++d) by_distance[d] = head.bias ? head.bias[d] * LOG2E : 0;
  for (int k = 0; k < NV * LANES; k += TOGETHER) {
    const Tabled *r0 = table + k * head.rows, *r1 = r0 + head.rows, *r2 = r1 + head.rows,
                 *r3 = r2 + head.rows;
    const float* q = queries + k;
    int64_t d = 0;
    for (; d + LANES <= head.rows; d += LANES)
      store(by_distance + d, load(by_distance + d) + (q[0] * load(r0 + d) + q[1] * load(r1 + d)) +
                                 (q[2] * load(r2 + d) + q[3] * load(r3 + d)));
    for (; d < head.rows; ++d)
      by_distance[d] +=
          q[0] * widened(r0[d]) + q[1] * widened(r1[d]) + q[2] * widened(r2[d]) + q[3] * widened(r3[d]);
  }
  return by_distance;
}

/// The answer of a step's only query, whose width is NV vectors.
template <int NV, class Stored>
inline void attend_token(const Head<Stored>& head, const Rule& rule, Scratch& scratch) {
  constexpr int CHUNK = 16 * LANES;  // keys that are scored before their values are read
  const int64_t pitch = head.ring_pitch;
  vec content_query[NV], position_query[NV], answer[NV];
  for (int v = 0; v < NV; ++v) {
    const vec q = load(head.query + v * LANES);
    content_query[v] = (head.u ? q + load(head.u + v * LANES) : q) * LOG2E;
    position_query[v] = (head.v ? q + load(head.v + v * LANES) : q) * LOG2E;
    answer[v] = vec{};
  }
  float most = NO_SCORE, total = 0, weights[CHUNK];
  const float* by_distance = head.table        ? score_table(head, head.table, position_query, scratch)
                             : head.half_table ? score_table(head, head.half_table, position_query, scratch)
                                               : nullptr;
  const int64_t longest = head.longest_distance(rule, 0);
  // Each turn takes slots that lie side by side: a chunk ends where the ring does.
  for (int64_t distance = longest; distance >= rule.nearest;) {
    const int64_t slot = head.slot(-distance);
    const int64_t count = std::min<int64_t>({CHUNK, distance - rule.nearest + 1, head.slots - slot});
    const Stored *key = head.keys + slot * pitch, *value = head.values + slot * pitch;
    vec highest = all(NO_SCORE);
    // Scores of LANES keys at a time. The last vector may pass the end: it repeats the last key, at minus
    // infinity.
    for (int64_t i = 0; i < count; i += LANES) {
      vec x[LANES];
      float extra[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const int64_t at = std::min(i + lane, count - 1);
        const Stored* k = key + at * pitch;
        x[lane] = vec{};
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) x[lane] += load(k + v * LANES) * content_query[v];
        extra[lane] =
            i + lane < count ? (by_distance ? by_distance[head.table_row(distance - at)] : 0) : -INFINITY;
      }
      const vec score = sums(x) + load(extra);
      store(weights + i, score);
      highest = larger(highest, score);
    }
    // Online softmax: where a score exceeds all before it, what was summed so far is scaled down to it.
    const float top = std::max(most, largest(highest));
    if (top > most) {
      const float factor = std::exp2(most - top);
      for (int v = 0; v < NV; ++v) answer[v] *= factor;
      total *= factor, most = top;
    }
    vec weight_sums = vec{};
    for (int64_t i = 0; i < count; i += LANES) {
      const vec weight = exp2_of(load(weights + i) - top);
      store(weights + i, weight);
      weight_sums += weight;
    }
    total += sum(weight_sums);
    for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) answer[v] += weights[i] * load(value + i * pitch + v * LANES);
    distance -= count;
  }
  const float factor = most > NO_SCORE ? 1 / total : 0;  // a query that sees no key answers zero
  for (int v = 0; v < NV; ++v) store(head.out + v * LANES, answer[v] * factor);
}

}  // namespace xl
