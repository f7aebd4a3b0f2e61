// The types in which memory, tables and persistent vectors are stored: floats, halves, and bytes with scales
// apart.
#pragma once

#include <algorithm>
#include <cmath>

#include "half.hpp"

namespace xl {

inline float widened(int8_t x) { return x; }

inline vec load(const int8_t* at) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#else
  vec x;
  for (int i = 0; i < LANES; ++i) x[i] = at[i];
  return x;
#endif
}

inline void copy(const int8_t* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

/// max |x| of a vector, or not a number if any of them is not finite.
inline float largest_magnitude(const float* from, int64_t count) {
  vec most{}, zeros{};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    const vec x = load(from + i);
    most = larger(larger(x, -x), most);
    zeros += x * 0;  // a maximum passes over NaN, and a sum does not
  }
  float top = largest(most), zero = sum(zeros);
  for (; i < count; ++i) top = std::max(top, std::fabs(from[i])), zero += from[i] * 0;
  return top + zero;
}

/// Stores a vector as bytes and returns their scale, which is max |x| / 127. What is not finite makes the
/// scale not a number. `xl_export/graph/memory.py` says the same in standard operators.
inline float quantise(const float* from, int64_t count, int8_t* to) {
  const float scale = largest_magnitude(from, count) / 127, divisor = scale == 0 ? 1 : scale;
  for (int64_t i = 0; i < count; ++i) {
    const float x = std::nearbyint(from[i] / divisor);  // of two that are equally near, the even one
    // A scale below the normal numbers has few bits, and a quotient may be larger than 127. NaN becomes -127.
    to[i] = static_cast<int8_t>(std::min(127.0f, x > -127 ? x : -127.0f));
  }
  return scale;
}

/// Numbers of a type that is known when the operator runs.
struct Numbers {
  enum Type { NONE, FLOATS, HALVES, BYTES };
  const void* data = nullptr;
  Type type = NONE;

  explicit operator bool() const { return type != NONE; }

  /// Calls work(p) with p the numbers as a pointer to their own type; there must be numbers.
  template <class Work>
  void as(const Work& work) const {
    if (type == FLOATS) work(static_cast<const float*>(data));
    if (type == HALVES) work(static_cast<const half*>(data));
    if (type == BYTES) work(static_cast<const int8_t*>(data));
  }

  /// The numbers from `count` on.
  Numbers from(int64_t count) const {
    return {static_cast<const char*>(data) + count * size(), type};
  }

  /// Bytes of one number.
  int64_t size() const { return type == FLOATS ? 4 : type == HALVES ? 2 : 1; }
};

}  // namespace xl
