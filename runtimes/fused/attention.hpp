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

/// One head of one stream. Rows of the ring and of the table are `width` floats, those of q are `pitch` apart.
struct Head {
  const float *query, *u, *v, *keys, *values, *table, *bias;  // u, v and bias may be null; table [rows, width]
  float* out;
  int64_t query_pitch, out_pitch, width, slots, rows, position, length;

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

/// The answers of queries first … first + count - 1 (count <= BLOCK) of one head.
inline void attend_block(const Head& head, const Rule& rule, int64_t first, int64_t count, Scratch& scratch) {
  const int64_t width = head.width, padded = (width + LANES - 1) / LANES * LANES, wide = 4 * BLOCK;
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
  Ahead ahead;

  // by_distance [count, wide]: from its column `base`, column c holds the score of distance `top` - c, so that key i of query t
  // is at BLOCK - 1 - t + i. The next block of keys is BLOCK columns further, and only its last half is new.
  int64_t base = 0;
  auto score_distances = [&](int64_t top, int64_t column) {
    if (top - column - BLOCK + 1 > reach || top - column < rule.nearest) return;
    for (int i = 0; i < BLOCK; ++i) {
      const int64_t row = head.row(top - column - i);
      rows[i] = head.table + row * width;
      bias[i] = head.bias ? head.bias[row] : 0;
    }
    pack_columns(rows, width, packed_rows);
    for (int64_t i = 0; i < BLOCK; i += TILE_VECTORS * LANES) {
      const int64_t nearest = top - column - i - TILE_VECTORS * LANES + 1, furthest = top - column - i;
      if (nearest > reach || furthest < rule.nearest) continue;
      for (int64_t t = 0; t < count; t += TILE_ROWS) {
        ahead.step(5);
        tile_of(std::min<int64_t>(TILE_ROWS, count - t), TILE_VECTORS)(asking + t * width, width, packed_rows + i, BLOCK, width,
                by_distance + t * wide + base + column + i, wide, head.bias ? bias + i : nullptr, 0);
      }
    }
  };

  for (int64_t start = begin; start < end; start += BLOCK) {
    const int64_t top = BLOCK - 1 - start, keys = std::min<int64_t>(BLOCK, end - start);
    if (start + BLOCK < end) {  // what the next block will read, where it is one run
      const int64_t after = head.slot(first + start + BLOCK), length = std::min<int64_t>(BLOCK, head.slots - after) * width;
      ahead.run(0, head.keys + after * width, length);
      ahead.run(1, head.values + after * width, length);
      const int64_t row = head.row(top - 3 * BLOCK + 1);
      ahead.run(2, head.table + row * width, std::min<int64_t>(BLOCK, head.rows - row) * width);
    }
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
      rows[i] = head.keys + (at < head.slots ? at : at - head.slots) * width;
    }
    pack_columns(rows, width, packed_keys);
    const float* values = head.values + slot * width;
    if (slot + BLOCK > head.slots || padded != width) {  // the ring ends within the block, or rows need zeros behind them
      for (int64_t i = 0; i < BLOCK; ++i) {
        float* value = packed_values + i * padded;
        std::memcpy(value, head.values + (rows[i] - head.keys), width * sizeof(float));
        std::fill(value + width, value + padded, 0.0f);
      }
      values = packed_values;
    }
    for (int64_t t = 0; t < count; t += TILE_ROWS) {
      const int64_t size = std::min<int64_t>(TILE_ROWS, count - t);
      const int64_t last = t + size - 1;  // what a query sees begins and ends no earlier than for the query before it
      const int64_t from = std::max<int64_t>(t - start - seen[t], 0), to = std::min(last - start - rule.nearest + 1, keys);
      if (from >= to) continue;
      constexpr int64_t step = TILE_VECTORS * LANES;
      for (int64_t i = from / step * step; i < to; i += step) {
        ahead.step(5);
        tile_of(size, TILE_VECTORS)(content + t * width, width, packed_keys + i, BLOCK, width, scores + t * BLOCK + i, BLOCK,
                                    by_distance + t * wide + base + BLOCK - 1 - t + i, wide - 1);
      }
      const int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
      const bool all_seen = last - start - seen[last] <= low && std::min(t - start - rule.nearest + 1, keys) >= high;
      for (int64_t r = t; r <= last; ++r) {
        float* score = scores + r * BLOCK;
        if (!all_seen) {
          const int64_t begins = std::clamp(r - start - seen[r], low, high);
          const int64_t ends = std::clamp(std::min(r - start - rule.nearest + 1, keys), begins, high);
          std::fill(score + low, score + begins, -INFINITY);
          std::fill(score + ends, score + high, -INFINITY);
        }
        vec top_score = load(score + low);
        for (int64_t i = low + LANES; i < high; i += LANES) top_score = larger(top_score, load(score + i));
        const float highest = std::max(most[r], largest(top_score));
        vec sum_of = load(total + r * LANES);
        if (highest > most[r]) {
          const float factor = std::exp(most[r] - highest);
          for (int64_t k = 0; k < padded; k += LANES) store(answers + r * padded + k, load(answers + r * padded + k) * factor);
          sum_of *= factor;
          most[r] = highest;
        }
        for (int64_t i = low; i < high; i += LANES) {
          const vec weight = exp_of(load(score + i) - highest);
          store(score + i, weight);
          sum_of += weight;
        }
        store(total + r * LANES, sum_of);
      }
      for (int64_t k = 0; k < padded; k += TILE_VECTORS * LANES) {
        ahead.step(10);
        const int vectors = static_cast<int>(std::min<int64_t>(TILE_VECTORS, (padded - k) / LANES));
        tile_of(size, vectors)(scores + t * BLOCK + low, BLOCK, values + low * padded + k, padded, high - low,
                               answers + t * padded + k, padded, answers + t * padded + k, padded);
      }
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    const float whole = sum(load(total + t * LANES)), factor = whole > 0 ? 1 / whole : 0;
    for (int64_t k = 0; k < width; ++k) head.out[(first + t) * head.out_pitch + k] = answers[t * padded + k] * factor;
  }
}

/// The answer of the only query of a step. width must be a multiple of LANES, at most MAX_VECTORS of them.
constexpr int MAX_VECTORS = 8;

template <int NV>
inline void attend_token(const Head& head, const Rule& rule) {
  constexpr int STEP = 16 * LANES;
  const int64_t width = NV * LANES;
  vec content[NV], asking[NV], answer[NV];
  for (int v = 0; v < NV; ++v) {
    const vec q = load(head.query + v * LANES);
    content[v] = head.u ? q + load(head.u + v * LANES) : q;
    asking[v] = head.v ? q + load(head.v + v * LANES) : q;
    answer[v] = vec{};
  }
  float most = NONE, total = 0, weights[STEP];
  const int64_t furthest = head.furthest(rule, 0);
  for (int64_t distance = furthest; distance >= rule.nearest;) {  // runs of slots side by side, oldest first
    const int64_t slot = head.slot(-distance);
    const int64_t count = std::min<int64_t>({STEP, distance - rule.nearest + 1, head.slots - slot});
    const float *key = head.keys + slot * width, *value = head.values + slot * width;
    vec highest = all(NONE);
    for (int64_t i = 0; i < count; i += LANES) {
      vec x[LANES];
      float extra[LANES];
      for (int lane = 0; lane < LANES; ++lane) {
        const int64_t at = std::min(i + lane, count - 1), row = head.row(distance - at);
        const float *k = key + at * width, *r = head.table + row * width;
        vec x0 = load(k) * content[0], x1 = load(r) * asking[0];
#pragma GCC unroll 8
        for (int v = 1; v < NV; ++v) x0 += load(k + v * LANES) * content[v], x1 += load(r + v * LANES) * asking[v];
        x[lane] = x0 + x1;
        extra[lane] = i + lane < count ? (head.bias ? head.bias[row] : 0) : -INFINITY;
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
      for (int v = 0; v < NV; ++v) answer[v] += weights[i] * load(value + i * width + v * LANES);
    distance -= count;
  }
  const float factor = total > 0 ? 1 / total : 0;
  for (int v = 0; v < NV; ++v) store(head.out + v * LANES, answer[v] * factor);
}

/// Answers of queries first … first + count - 1 of one head.
inline void attend(const Head& head, const Rule& rule, int64_t first, int64_t count, Scratch& scratch) {
  if (head.length == 1 && head.width % LANES == 0) switch (head.width / LANES) {
      case 1: return attend_token<1>(head, rule);
      case 2: return attend_token<2>(head, rule);
      case 3: return attend_token<3>(head, rule);
      case 4: return attend_token<4>(head, rule);
      case 8: return attend_token<8>(head, rule);
    }
  attend_block(head, rule, first, count, scratch);
}

}  // namespace xl
