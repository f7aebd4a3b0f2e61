// Relative attention over a ring memory, one head of one stream at a time, by online softmax: scores never leave the cache.
//
// For the query at position p + t and the key at distance d:
//   score = (q + u)·k + (q + v)·r(d) + bias(d), over nearest <= d <= window, where 1/sqrt(K) is folded into q, u and v.
// Time runs from the segment's first token at 0: the key at time j has distance t - j and lies in slot (p + j) mod S.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <utility>

#include "vectors.hpp"

namespace xl {

constexpr int BLOCK = 128;  // queries, and keys, that are worked on together
constexpr float NONE = -1e30f;

struct Rule {
  int64_t mem_len, nearest;  // tokens remembered; smallest distance seen
  bool full;                 // whether the window grows by one with each token of the segment
};

/// One head of one stream. Its rows are `width` floats, so far apart as the pitches say; those of the table
/// are `rows` distances.
struct Head {
  const float *query, *u, *v, *keys, *values, *table, *bias;  // u, v, bias [rows] and table [width, rows] may be null
  float* out;
  int64_t query_pitch, ring_pitch, out_pitch, width, slots, rows, position, length;

  int64_t slot(int64_t time) const {
    const int64_t s = (position + time) % slots;
    return s < 0 ? s + slots : s;
  }
  int64_t row(int64_t distance) const { return std::clamp<int64_t>(distance, 0, rows - 1); }
  int64_t furthest(const Rule& rule, int64_t t) const {
    return std::min(rule.mem_len + (rule.full ? t : 0), std::max<int64_t>(position + t, 0));
  }
};

/// Aligned floats that grow as needed and stay with their thread.
class Scratch {
 public:
  ~Scratch() { std::free(floats_); }
  float* take(int64_t count) {
    if (count > size_) {
      std::free(floats_);
      size_ = 0;
      floats_ = static_cast<float*>(std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
      if (!floats_) throw std::bad_alloc();
      size_ = count;
    }
    return floats_;
  }

 private:
  float* floats_ = nullptr;
  int64_t size_ = 0;
};

/// rows[i] (width floats) → column i of packed [width, BLOCK].
inline void pack_columns(const float* const* rows, int64_t width, float* packed) {
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES)
    for (int i = 0; i < BLOCK; i += LANES) {
      vec x[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) x[lane] = load(rows[i + lane] + k);
      transpose(x);
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) store(packed + (k + lane) * BLOCK + i, x[lane]);
    }
  for (; k < width; ++k)
    for (int i = 0; i < BLOCK; ++i) packed[k * BLOCK + i] = rows[i][k];
}

/// Distances `top`, top - 1, … of a table [width, rows] → packed [width, BLOCK]; those beyond either end are the last there.
inline void pack_distances(const float* table, int64_t width, int64_t rows, int64_t top, float* packed) {
  const bool inside = top < rows && top - BLOCK + 1 >= 0;
  for (int64_t k = 0; k < width; ++k, table += rows, packed += BLOCK) {
    if (inside)
      for (int i = 0; i < BLOCK; i += LANES) store(packed + i, reversed(load(table + top - i - LANES + 1)));
    else
      for (int i = 0; i < BLOCK; ++i) packed[i] = table[std::clamp<int64_t>(top - i, 0, rows - 1)];
  }
}

/// The largest of `count` scores, a multiple of LANES; inlined, so that a constant count has no loop.
__attribute__((always_inline)) inline float largest_of(const float* scores, int64_t count) {
  vec above = load(scores);
#pragma GCC unroll 8
  for (int64_t i = LANES; i < count; i += LANES) above = larger(above, load(scores + i));
  return largest(above);
}

/// e^(score - most) in the place of each of `count` scores, and their sum by lanes.
__attribute__((always_inline)) inline vec weigh(float* scores, int64_t count, float most) {
  vec sum_of = vec{};
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i += LANES) {
    const vec weight = exp_of(load(scores + i) - most);
    store(scores + i, weight);
    sum_of += weight;
  }
  return sum_of;
}

/// The answers of queries first … first + count - 1 (count <= BLOCK) of one head.
inline void attend_block(const Head& head, const Rule& rule, int64_t first, int64_t count, Scratch& scratch) {
  const int64_t width = head.width, padded = (width + LANES - 1) / LANES * LANES, wide = 4 * BLOCK, pitch = head.ring_pitch;
  float* at = scratch.take(BLOCK * (2 * width + 2 * width + wide + BLOCK + 2 * padded) + (LANES + 2) * BLOCK);
  auto next = [&at](int64_t floats) { return std::exchange(at, at + floats); };
  float *packed_keys = next(width * BLOCK), *packed_rows = next(width * BLOCK), *by_distance = next(BLOCK * wide);
  float *scores = next(BLOCK * BLOCK), *packed_values = next(BLOCK * padded), *answers = next(BLOCK * padded);
  float *content = next(BLOCK * width), *asking = next(BLOCK * width);
  float *most = next(BLOCK), *total = next(BLOCK * LANES), *bias = next(BLOCK);

  int64_t seen[BLOCK], begin = INT64_MAX, reach = 0;  // the furthest distance of each query; the earliest time; all of them
  for (int64_t t = 0; t < count; ++t) {
    const float* q = head.query + (first + t) * head.query_pitch;
    for (int64_t k = 0; k < width; ++k) {
      content[t * width + k] = q[k] + (head.u ? head.u[k] : 0);
      asking[t * width + k] = q[k] + (head.v ? head.v[k] : 0);
    }
    seen[t] = head.furthest(rule, first + t);
    begin = std::min(begin, t - seen[t]);
    reach = std::max(reach, seen[t]);
    most[t] = NONE;
    store(total + t * LANES, vec{});
  }
  std::memset(answers, 0, BLOCK * padded * sizeof(float));
  const int64_t end = count - rule.nearest;  // times from here on are seen by no query
  const float* rows[BLOCK];

  // by_distance [count, wide]: from its column `base`, column c holds the score of distance `top` - c, so that key i of query t
  // is at BLOCK - 1 - t + i. The next block of keys is BLOCK columns further, and only its last half is new.
  int64_t base = 0;
  auto score_distances = [&](int64_t top, int64_t column) {
    if (!head.table || top - column - BLOCK + 1 > reach || top - column < rule.nearest) return;
    pack_distances(head.table, width, head.rows, top - column, packed_rows);
    if (head.bias) pack_distances(head.bias, 1, head.rows, top - column, bias);
    for (int64_t i = 0; i < BLOCK; i += TILE_VECTORS * LANES) {
      const int64_t nearest = top - column - i - TILE_VECTORS * LANES + 1, furthest = top - column - i;
      if (nearest > reach || furthest < rule.nearest) continue;
      for (int64_t t = 0; t < count; t += TILE_ROWS) {
        tile_of(std::min<int64_t>(TILE_ROWS, count - t), TILE_VECTORS)(asking + t * width, width, packed_rows + i, BLOCK, width,
                by_distance + t * wide + base + column + i, wide, head.bias ? bias + i : nullptr, 0);
      }
    }
  };

  for (int64_t start = begin; start < end; start += BLOCK) {
    const int64_t top = BLOCK - 1 - start, keys = std::min<int64_t>(BLOCK, end - start);
    if (start == begin) {
      score_distances(top, 0);
    } else if (base + 3 * BLOCK <= wide) {
      base += BLOCK;
    } else {
      for (float* row = by_distance; row < by_distance + count * wide; row += wide)
        std::memcpy(row, row + base + BLOCK, BLOCK * sizeof(float));
      base = 0;
    }
    score_distances(top, BLOCK);
    const int64_t slot = head.slot(first + start);
    for (int64_t i = 0; i < BLOCK; ++i) {
      const int64_t at = slot + std::min(i, keys - 1);
      rows[i] = head.keys + (at < head.slots ? at : at - head.slots) * pitch;
    }
    pack_columns(rows, width, packed_keys);
    const float* values = head.values + slot * pitch;
    int64_t values_pitch = pitch;
    if (slot + BLOCK > head.slots || padded != width) {  // the ring ends within the block, or rows need zeros behind them
      for (int64_t i = 0; i < BLOCK; ++i) {
        float* value = packed_values + i * padded;
        std::memcpy(value, head.values + (rows[i] - head.keys), width * sizeof(float));
        std::fill(value + width, value + padded, 0.0f);
      }
      values = packed_values, values_pitch = padded;
    }
    for (int64_t t = 0; t < count; t += TILE_ROWS) {
      const int64_t size = std::min<int64_t>(TILE_ROWS, count - t);
      const int64_t last = t + size - 1;  // what a query sees begins and ends no earlier than for the query before it
      const int64_t from = std::max<int64_t>(t - start - seen[t], 0), to = std::min(last - start - rule.nearest + 1, keys);
      if (from >= to) continue;
      constexpr int64_t step = TILE_VECTORS * LANES;
      for (int64_t i = from / step * step; i < to; i += step) {
        tile_of(size, TILE_VECTORS)(content + t * width, width, packed_keys + i, BLOCK, width, scores + t * BLOCK + i, BLOCK,
                                    head.table ? by_distance + t * wide + base + BLOCK - 1 - t + i : nullptr, wide - 1);
      }
      const int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
      const bool all_seen = last - start - seen[last] <= low && std::min(t - start - rule.nearest + 1, keys) >= high;
      float highest[TILE_ROWS];
      for (int64_t r = t; r <= last; ++r) {
        float* score = scores + r * BLOCK;
        if (!all_seen) {
          const int64_t begins = std::clamp(r - start - seen[r], low, high);
          const int64_t ends = std::clamp(std::min(r - start - rule.nearest + 1, keys), begins, high);
          std::fill(score + low, score + begins, -INFINITY);
          std::fill(score + ends, score + high, -INFINITY);
        }
        highest[r - t] = high - low == BLOCK ? largest_of(score, BLOCK) : largest_of(score + low, high - low);
      }
      for (int64_t r = t; r <= last; ++r) {
        float* score = scores + r * BLOCK;
        vec sum_of = load(total + r * LANES);
        if (highest[r - t] > most[r]) {
          const float factor = std::exp(most[r] - highest[r - t]);
          for (int64_t k = 0; k < padded; k += LANES) store(answers + r * padded + k, load(answers + r * padded + k) * factor);
          sum_of *= factor;
          most[r] = highest[r - t];
        }
        sum_of += high - low == BLOCK ? weigh(score, BLOCK, most[r]) : weigh(score + low, high - low, most[r]);
        store(total + r * LANES, sum_of);
      }
      for (int64_t k = 0; k < padded; k += TILE_VECTORS * LANES) {
        const int vectors = static_cast<int>(std::min<int64_t>(TILE_VECTORS, (padded - k) / LANES));
        tile_of(size, vectors)(scores + t * BLOCK + low, BLOCK, values + low * values_pitch + k, values_pitch, high - low,
                               answers + t * padded + k, padded, answers + t * padded + k, padded);
      }
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    const float whole = sum(load(total + t * LANES)), factor = most[t] > NONE ? 1 / whole : 0;
    for (int64_t k = 0; k < width; ++k) head.out[(first + t) * head.out_pitch + k] = answers[t * padded + k] * factor;
  }
}

/// asking · r(d) + bias(d) for every row of the table, which is read once from its beginning to its end.
template <int NV>
inline const float* score_table(const Head& head, const vec (&asking)[NV], Scratch& scratch) {
  constexpr int TOGETHER = 4;  // rows of the table
  float *by_distance = scratch.take(head.rows), queries[NV * LANES];
  for (int v = 0; v < NV; ++v) store(queries + v * LANES, asking[v]);
  for (int64_t d = 0; d < head.rows; ++d) by_distance[d] = head.bias ? head.bias[d] : 0;
  for (int k = 0; k < NV * LANES; k += TOGETHER) {
    const float *a = head.table + k * head.rows, *b = a + head.rows, *c = b + head.rows, *e = c + head.rows;
    const float* q = queries + k;
    int64_t d = 0;
    for (; d + LANES <= head.rows; d += LANES)
      store(by_distance + d, load(by_distance + d) + (q[0] * load(a + d) + q[1] * load(b + d)) +
                                 (q[2] * load(c + d) + q[3] * load(e + d)));
    for (; d < head.rows; ++d) by_distance[d] += q[0] * a[d] + q[1] * b[d] + q[2] * c[d] + q[3] * e[d];
  }
  return by_distance;
}

/// The answer of the only query of a step, its width being NV vectors.
template <int NV>
inline void attend_token(const Head& head, const Rule& rule, Scratch& scratch) {
  constexpr int STEP = 16 * LANES;
  const int64_t width = NV * LANES, pitch = head.ring_pitch;
  vec content[NV], asking[NV], answer[NV];
  for (int v = 0; v < NV; ++v) {
    const vec q = load(head.query + v * LANES);
    content[v] = head.u ? q + load(head.u + v * LANES) : q;
    asking[v] = head.v ? q + load(head.v + v * LANES) : q;
    answer[v] = vec{};
  }
  float most = NONE, total = 0, weights[STEP];
  const float* by_distance = head.table ? score_table<NV>(head, asking, scratch) : nullptr;
  const int64_t furthest = head.furthest(rule, 0);
  for (int64_t distance = furthest; distance >= rule.nearest;) {  // runs of slots side by side, oldest first
    const int64_t slot = head.slot(-distance);
    const int64_t count = std::min<int64_t>({STEP, distance - rule.nearest + 1, head.slots - slot});
    const float *key = head.keys + slot * pitch, *value = head.values + slot * pitch;
    vec highest = all(NONE);
    for (int64_t i = 0; i < count; i += LANES) {
      vec x[LANES];
      float extra[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const int64_t at = std::min(i + lane, count - 1);
        const float* k = key + at * pitch;
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
      const float factor = std::exp(most - top);
      for (int v = 0; v < NV; ++v) answer[v] *= factor;
      total *= factor, most = top;
    }
    vec sum_of = vec{};
    for (int64_t i = 0; i < count; i += LANES) {
      const vec weight = exp_of(load(weights + i) - top);
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

/// Answers of queries first … first + count - 1 of one head.
inline void attend(const Head& head, const Rule& rule, int64_t first, int64_t count, Scratch& scratch) {
  if (head.length == 1 && head.width % LANES == 0) switch (head.width / LANES) {
      case 1: return attend_token<1>(head, rule, scratch);
      case 2: return attend_token<2>(head, rule, scratch);
      case 3: return attend_token<3>(head, rule, scratch);
      case 4: return attend_token<4>(head, rule, scratch);
      case 8: return attend_token<8>(head, rule, scratch);
    }
  attend_block(head, rule, first, count, scratch);
}

}  // namespace xl
