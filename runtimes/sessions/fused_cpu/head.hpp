// What attention of one head of one stream reads and writes.
//
// For the query at position p + t and the key at distance d:
//   score = (q + u)·k + (q + v)·r(d) + bias(d), over nearest <= d <= window. 1/sqrt(K) is already part of q,
//   u and v.
// Persistent vectors, if the model has them, are keys without a distance, with the score q·k. With a gate,
// the answer is the sum of e^score m(d) value, divided by the sum of e^score m(d) plus epsilon times that of
// e^score; m is 1 for persistent vectors.
// Softmax is computed online, a block of keys at a time, so that the scores never leave the processor's
// cache.
//
// Times are counted from the segment's first token, which is at time 0. The key at time j has distance t - j
// from the query at time t, and lies in slot (p + j) mod S of the ring.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "numbers.hpp"

namespace xl {

constexpr int BLOCK_TOKENS = 128;  // queries, and keys, that are worked on together
// Below every score: the largest score of no keys. It is exact although the compiler may fuse a product and a
// sum (-ffp-contract): it is only compared with scores and subtracted from them, never multiplied. The masks
// themselves are minus infinity, and what is not a number must stay so: variants.py does not give -ffast-math.
constexpr float NO_SCORE = -1e30f;
constexpr float LOG2E =
    1.44269504f;            // log2(e); queries are multiplied by it, so that e^score becomes 2^score
constexpr float MAX_EXCESS = 8;  // how far a score may exceed the reference of its row, in powers of two

struct Rule {
  int64_t mem_len, nearest;  // tokens remembered; the smallest visible distance
  bool window_grows;         // whether the window grows by one with each token of the segment
  float epsilon;             // of a model with a gate
};

/// The scales from `count` on, if there are any.
inline const float* from(const float* scales, int64_t count) { return scales ? scales + count : nullptr; }

/// One head of one stream. Rows of queries, keys, values and answers have `width` numbers, and begin a pitch
/// apart. Tables of bytes have a scale for each distance, key or value, and a ring of bytes for each slot.
template <class Stored>
struct Head {
  const float *query, *u, *v, *bias, *gate;    // u, v, and bias and gate by distance [rows], may be null
  Numbers table;                               // r(d) as [width, rows], or none
  const float* table_scales;                   // [rows], if the table has bytes
  const Stored *keys, *values;                 // floats, halves or bytes
  const float *key_scales, *value_scales;      // [slots], if the ring has bytes
  const float *initial_key, *initial_value;    // of a token before the stream; null if it is not seen
  Numbers persistent_keys, persistent_values;  // [width, persistent] and [persistent, width], or none
  const float *persistent_key_scales, *persistent_value_scales;  // [persistent], if they are bytes
  float* out;
  int64_t query_pitch, ring_pitch, out_pitch, width, slots, rows, persistent, position, length;

  /// The slot of the ring that holds the token at this time.
  int64_t slot(int64_t time) const {
    const int64_t s = (position + time) % slots;
    return s < 0 ? s + slots : s;
  }
  /// The longest distance that the query at time t sees; it ends at the beginning of the text where nothing
  /// before it is seen.
  int64_t longest_distance(const Rule& rule, int64_t t) const {
    const int64_t window = rule.mem_len + (rule.window_grows ? t : 0);
    return initial_key ? window : std::min(window, std::max<int64_t>(position + t, 0));
  }
};

/// Working memory of one thread: aligned floats, kept from call to call.
class Scratch {
 public:
  /// At least `count` floats; what an earlier call returned is no longer valid.
  float* take(int64_t count) {
    if (count > size_) {
      floats_.reset(), size_ = 0;
      floats_.reset(static_cast<float*>(::operator new(count * sizeof(float), ALIGNMENT)));
      size_ = count;
    }
    return floats_.get();
  }

 private:
  static constexpr std::align_val_t ALIGNMENT{64};
  struct Free {
    void operator()(float* floats) const { ::operator delete(floats, ALIGNMENT); }
  };

  std::unique_ptr<float, Free> floats_;
  int64_t size_ = 0;
};

}  // namespace xl
