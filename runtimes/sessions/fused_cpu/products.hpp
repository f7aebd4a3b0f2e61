// Sums of products of whole numbers, in the instructions that the processor has for them: activations of 16 bits by
// weights of 8 or 4.
//
// A word is a number of WORD_BITS bits that holds one or more weights of a row k: see `matrix.hpp`. GROUP values of k
// are multiplied together; a group of a row of activations takes 2 GROUP bytes. Integer sums are exact, so every variant
// gets the same bits.
//
//   GROUP 2   words of 16 bits, by pairs of activations of 16 bits
//   GROUP 4   words of 8 bits, by ARM's dot products (sdot). An activation is 256 high + low, with both in bytes: a
//             group of activations is its high bytes, then its low ones
//   GROUP 8   likewise, by ARM's products of matrices (smmla): one instruction multiplies the high and the low bytes of
//             8 activations by 2 columns
#pragma once

#include "vectors.hpp"

namespace xl {

constexpr float MOST_ROUNDED = 127 * 256 + 127;  // the largest number whose high and low part are signed bytes

#if defined(__ARM_FEATURE_MATMUL_INT8)
using Word = int8_t;
constexpr int GROUP = 8;
#elif defined(__ARM_FEATURE_DOTPROD)
using Word = int8_t;
constexpr int GROUP = 4;
#else
using Word = int16_t;
constexpr int GROUP = 2;
#endif

constexpr int WORD_BITS = 8 * sizeof(Word);
typedef Word words __attribute__((vector_size(LANES * 4)));

/// The words of a group for one vector of columns.
struct Strip {
  static constexpr int VECTORS = GROUP * sizeof(Word) / 4;
  words vectors[VECTORS];

  Strip shifted(int bits) const {
    Strip result;
    for (int i = 0; i < VECTORS; ++i) result.vectors[i] = vectors[i] >> bits;
    return result;
  }
};

#if defined(__ARM_FEATURE_MATMUL_INT8)
struct Activations {
  int8x16_t high_and_low;
  explicit Activations(const int16_t* at) : high_and_low(vld1q_s8(reinterpret_cast<const int8_t*>(at))) {}
};

/// Sums of products for one vector of columns.
struct Sums {
  int32x4_t pairs[2];  // of two columns: those of the high bytes, then those of the low ones

  void add(const Activations& x, const Strip& w) {
    for (int i = 0; i < 2; ++i) pairs[i] = vmmlaq_s32(pairs[i], x.high_and_low, (int8x16_t)w.vectors[i]);
  }
  ivec total() const {
    const int64x2_t a = vreinterpretq_s64_s32(pairs[0]), b = vreinterpretq_s64_s32(pairs[1]);
    return ((ivec)vzip1q_s64(a, b) << 8) + (ivec)vzip2q_s64(a, b);
  }
};
#elif defined(__ARM_FEATURE_DOTPROD)
struct Activations {
  ivec high, low;  // the same four bytes in every lane
  explicit Activations(const int16_t* at) {
    int32_t bytes[2];
    std::memcpy(bytes, at, sizeof(bytes));
    high = bytes[0] - ivec{}, low = bytes[1] - ivec{};
  }
};

/// Sums of products for one vector of columns.
struct Sums {
  int32x4_t high, low;

  void add(const Activations& x, const Strip& w) {
    high = vdotq_s32(high, (int8x16_t)w.vectors[0], (int8x16_t)x.high);
    low = vdotq_s32(low, (int8x16_t)w.vectors[0], (int8x16_t)x.low);
  }
  ivec total() const { return ((ivec)high << 8) + (ivec)low; }
};

#else
struct Activations {
  ivec pair;  // the same two numbers in every lane
  explicit Activations(const int16_t* at) {
    int32_t bits;
    std::memcpy(&bits, at, sizeof(bits));
    pair = bits - ivec{};
  }
};

/// Sums of products for one vector of columns.
struct Sums {
  ivec pairs;

  void add(const Activations& x, const Strip& w) { pairs = add_pairs(pairs, x.pair, (ivec)w.vectors[0]); }
  ivec total() const { return pairs; }
};
#endif

/// Turns numbers of 16 bits, a multiple of 8, into groups.
inline void group(int16_t* numbers, int64_t count) {
#if defined(__ARM_FEATURE_DOTPROD)
  for (int64_t i = 0; i < count; i += 8) {
    const int16x8_t x = vld1q_s16(numbers + i);
    const int32x2_t high = vreinterpret_s32_s8(vrshrn_n_s16(x, 8)), low = vreinterpret_s32_s8(vmovn_s16(x));
    const int32x2x2_t halves = vzip_s32(high, low);
    const int32x4_t bytes = GROUP == 8 ? vcombine_s32(high, low) : vcombine_s32(halves.val[0], halves.val[1]);
    vst1q_s32(reinterpret_cast<int32_t*>(numbers + i), bytes);
  }
#endif
}

}  // namespace xl
