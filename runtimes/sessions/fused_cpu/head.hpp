// Relative attention over a ring memory, one head of one stream at a time, by online softmax: scores never leave the cache.
//
// For the query at position p + t and the key at distance d:
//   score = (q + u)·k + (q + v)·r(d) + bias(d), over nearest <= d <= window, where 1/sqrt(K) is folded into q, u and v.
// Time runs from the segment's first token at 0: the key at time j has distance t - j and lies in slot (p + j) mod S.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "half.hpp"

namespace xl {

constexpr int BLOCK = 128;  // queries, and keys, that are worked on together
constexpr float NONE = -1e30f;
constexpr float LOG2E = 1.44269504f;  // queries carry it, so that e^score is 2^score
constexpr float SLACK = 8;            // what a score may exceed the reference of its row by, in powers of two

struct Rule {
  int64_t mem_len, nearest;  // tokens remembered; smallest distance seen
  bool full;                 // whether the window grows by one with each token of the segment
};

/// One head of one stream. Its rows are `width` floats, so far apart as the pitches say; those of the table
/// are `rows` distances. Keys and values are floats or halves.
template <class Stored>
struct Head {
  const float *query, *u, *v, *bias;  // u, v and bias [rows] may be null
  const float* table;                 // [width, rows], or null
  const half* half_table;             // the same in halves, instead
  const Stored *keys, *values;
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

}  // namespace xl
