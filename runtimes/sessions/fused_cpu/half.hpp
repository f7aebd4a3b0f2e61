// Half-precision numbers: memory and tables may be stored in them, and everything is computed in floats.
#pragma once

#include <algorithm>

#include "vectors.hpp"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace xl {

struct half {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float widened(float x) { return x; }

inline float widened(half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  return float_of(sign |
                  bits_of(float_of(rest << 13) * 0x1p112f));  // the exponent bias of floats is larger by 112
}

/// The nearest half; of two that are equally near, the even one.
inline half narrowed(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000, rest = bits_of(x) & 0x7fffffff;
  uint32_t bits;
  if (rest > 0x7f800000) bits = 0x7e00;
  else if (rest >= 0x477ff000) bits = 0x7c00;  // 65,520 and more become infinity
  else if (rest < 0x38800000)
    bits = bits_of(float_of(rest) + 0.5f) - 0x3f000000;  // subnormal: the addition rounds
  else bits = (rest + 0xc8000fff + (rest >> 13 & 1)) >> 13;
  return {static_cast<uint16_t>(sign | bits)};
}

inline vec load(const half* at) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__aarch64__)
  return (vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&at->bits)));
#else
  vec x;
  for (int i = 0; i < LANES; ++i) x[i] = widened(at[i]);
  return x;
#endif
}

inline void store(half* at, vec x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(&at->bits, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
  for (int i = 0; i < LANES; ++i) at[i] = narrowed(x[i]);
#endif
}

inline void copy(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}

inline void copy(const half* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widened(from[i]);
}

inline void copy(const float* from, int64_t count, half* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = narrowed(from[i]);
}

}  // namespace xl
