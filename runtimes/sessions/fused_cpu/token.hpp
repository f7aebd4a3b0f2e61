// The only query of a step against all that it sees: memory is read once, in its order.
#pragma once

#include <cmath>

#include "head.hpp"

namespace xl {

/// asking · r(d) + bias(d) for every row of the table, which is read once from its beginning to its end.
template <int NV, class Stored, class Tabled>
inline const float* score_table(const Head<Stored>& head, const Tabled* table, const vec (&asking)[NV], Scratch& scratch) {
  constexpr int TOGETHER = 4;  // rows of the table
  float *by_distance = scratch.take(head.rows), queries[NV * LANES];
  for (int v = 0; v < NV; ++v) store(queries + v * LANES, asking[v]);
  for (int64_t d = 0; d < head.rows; ++d) by_distance[d] = head.bias ? head.bias[d] * LOG2E : 0;
  for (int k = 0; k < NV * LANES; k += TOGETHER) {
    const Tabled *a = table + k * head.rows, *b = a + head.rows, *c = b + head.rows, *e = c + head.rows;
    const float* q = queries + k;
    int64_t d = 0;
    for (; d + LANES <= head.rows; d += LANES)
      store(by_distance + d, load(by_distance + d) + (q[0] * load(a + d) + q[1] * load(b + d)) +
                                 (q[2] * load(c + d) + q[3] * load(e + d)));
    for (; d < head.rows; ++d)
      by_distance[d] += q[0] * widened(a[d]) + q[1] * widened(b[d]) + q[2] * widened(c[d]) + q[3] * widened(e[d]);
  }
  return by_distance;
}

/// The answer of the only query of a step, its width being NV vectors.
template <int NV, class Stored>
inline void attend_token(const Head<Stored>& head, const Rule& rule, Scratch& scratch) {
  constexpr int STEP = 16 * LANES;
  const int64_t pitch = head.ring_pitch;
  vec content[NV], asking[NV], answer[NV];
  for (int v = 0; v < NV; ++v) {
    const vec q = load(head.query + v * LANES);
    content[v] = (head.u ? q + load(head.u + v * LANES) : q) * LOG2E;
    asking[v] = (head.v ? q + load(head.v + v * LANES) : q) * LOG2E;
    answer[v] = vec{};
  }
  float most = NONE, total = 0, weights[STEP];
  const float* by_distance = head.table        ? score_table(head, head.table, asking, scratch)
                             : head.half_table ? score_table(head, head.half_table, asking, scratch)
                                               : nullptr;
  const int64_t furthest = head.furthest(rule, 0);
  for (int64_t distance = furthest; distance >= rule.nearest;) {  // runs of slots side by side, oldest first
    const int64_t slot = head.slot(-distance);
    const int64_t count = std::min<int64_t>({STEP, distance - rule.nearest + 1, head.slots - slot});
    const Stored *key = head.keys + slot * pitch, *value = head.values + slot * pitch;
    vec highest = all(NONE);
    for (int64_t i = 0; i < count; i += LANES) {
      vec x[LANES];
      float extra[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const int64_t at = std::min(i + lane, count - 1);
        const Stored* k = key + at * pitch;
        x[lane] = vec{};
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) x[lane] += load(k + v * LANES) * content[v];
        extra[lane] = i + lane < count ? (by_distance ? by_distance[head.row(distance - at)] : 0) : -INFINITY;
      }
      const vec score = sums(x) + load(extra);
      store(weights + i, score);
      highest = larger(highest, score);
    }
    const float top = std::max(most, largest(highest));
    if (top > most) {
      const float factor = std::exp2(most - top);
      for (int v = 0; v < NV; ++v) answer[v] *= factor;
      total *= factor, most = top;
    }
    vec sum_of = vec{};
    for (int64_t i = 0; i < count; i += LANES) {
      const vec weight = exp2_of(load(weights + i) - top);
      store(weights + i, weight);
      sum_of += weight;
    }
    total += sum(sum_of);
    for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) answer[v] += weights[i] * load(value + i * pitch + v * LANES);
    distance -= count;
  }
  const float factor = most > NONE ? 1 / total : 0;
  for (int v = 0; v < NV; ++v) store(head.out + v * LANES, answer[v] * factor);
}

}  // namespace xl
