// Vectors of floats, as wide as those of the processor that this is compiled for, and the few operations
// on them that attention is made of.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace xl {

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2;
#else
constexpr int LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 2;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef int16_t shorts __attribute__((vector_size(LANES * 2)));  // one for each float of a vector
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // at any address

inline vec load(const float* at) { return *reinterpret_cast<const loose*>(at); }
inline void store(float* at, vec x) { *reinterpret_cast<loose*>(at) = x; }
inline vec all(float x) { return x - vec{}; }

/// One 16-bit number for each lane, widened to 32 bits.
inline ivec load_whole(const int16_t* at) {
#if defined(__AVX512F__)
  return (ivec)_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__)
  return (ivec)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
  shorts numbers;
  std::memcpy(&numbers, at, sizeof(numbers));
  return __builtin_convertvector(numbers, ivec);
#endif
}

/// total + a b, rounded once if the processor can. Left to itself, the compiler fuses the two in some loops and
/// not in others, and a row's result would depend on how many rows are computed with it.
inline vec add_product(vec total, vec a, vec b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, total);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, total);
#elif defined(__aarch64__)
  return (vec)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
  return total + a * b;
#endif
}

/// total + the products of 16-bit numbers, of which each lane of a and b has two: a_low b_low + a_high b_high.
inline ivec add_pairs(ivec total, ivec a, ivec b) {
#if defined(__AVX512VNNI__)
  return (ivec)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return total + (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return total + (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__) && !defined(__AVX__)
  return total + (ivec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return total + (ivec)vpaddq_s32(low, vmull_high_s16(x, y));
#else
  return total + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/// The larger of each pair, and b where either is not a number.
inline vec larger(vec a, vec b) { return a > b ? a : b; }

using Lanes = std::make_integer_sequence<int, LANES>;

/// Lanes of a and b at these indices; those of b begin with LANES.
template <class Vector, int... INDICES>
inline Vector picked(Vector a, Vector b, std::integer_sequence<int, INDICES...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, INDICES...);
#else
  return __builtin_shuffle(a, b, ivec{INDICES...});
#endif
}

/// The lanes FIRST of a and of b, FIRST + 1 of a and of b, and so on.
template <int FIRST, int... I>
inline vec zipped(vec a, vec b, std::integer_sequence<int, I...>) {
  return picked(a, b, std::integer_sequence<int, (FIRST + I / 2 + I % 2 * LANES)...>());
}

/// Transposes LANES × LANES floats by log2(LANES) perfect shuffles.
inline void transpose(vec (&x)[LANES]) {
  for (int stage = 1; stage < LANES; stage *= 2) {
    vec y[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; ++i) {
      y[2 * i] = zipped<0>(x[i], x[i + LANES / 2], Lanes());
      y[2 * i + 1] = zipped<LANES / 2>(x[i], x[i + LANES / 2], Lanes());
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) x[i] = y[i];
  }
}

/// The sums of LANES vectors: lane i of the result is the sum over x[i].
inline vec sums(vec (&x)[LANES]) {
#pragma GCC unroll 4
  for (int half = LANES / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      x[i] = zipped<0>(x[i], x[i + half], Lanes()) + zipped<LANES / 2>(x[i], x[i + half], Lanes());
  }
  return x[0];
}

/// Lanes that are BY apart change places: lane i becomes lane i xor BY.
template <int BY, class Vector, int... I>
inline Vector exchanged(Vector x, std::integer_sequence<int, I...>) {
  return picked(x, x, std::integer_sequence<int, (I ^ BY)...>());
}

inline vec reversed(vec x) { return exchanged<LANES - 1>(x, Lanes()); }

/// All lanes combined by a function of two vectors.
template <int BY = LANES / 2, class Vector, class Combine>
inline auto folded(Vector x, const Combine& combine) {
  x = combine(x, exchanged<BY>(x, Lanes()));
  if constexpr (BY > 1) return folded<BY / 2>(x, combine);
  else return x[0];
}

inline float sum(vec x) {
  return folded(x, [](vec a, vec b) { return a + b; });
}

inline float largest(vec x) { return folded(x, larger); }

/// 2^r for |r| <= 1/2, with a relative error of at most 2.3e-7.
inline vec exp2_near_zero(vec r) {
  vec y = all(1.3276472e-3f);
  y = y * r + 9.6755415e-3f;
  y = y * r + 5.55071328e-2f;
  y = y * r + 2.40221197e-1f;
  y = y * r + 6.93146967e-1f;
  return y * r + 1.00000007f;
}

/// 2^x for x <= 100; at most 2^-126 where x is below -126; NaN stays NaN.
inline vec exp2_of(vec x) {
#if defined(__AVX512F__)
  const vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT);
  return _mm512_scalef_ps(exp2_near_zero(x - n), n);  // the instruction gives 0 for minus infinity
#else
  const vec rounder = all(12582912.0f), power = larger(all(-126.0f), x), shifted = power + rounder;
  const vec y = exp2_near_zero(power - (shifted - rounder));
  const vec scaled = (vec)((ivec)y + ((ivec)shifted << 23));  // the low bits of `shifted` are the integer n
  return x == x ? scaled : x;
#endif
}

/// acc [ROWS, NV vectors] += A [ROWS, depth] · B [depth, NV vectors], in order of depth.
///
/// For each 16 of depth, the 256 bytes at `ahead` are fetched into the cache, and `ahead` moves on by
/// `ahead_pitch` bytes: so memory that is needed later arrives while this product is computed.
template <int ROWS, int NV>
__attribute__((always_inline)) inline void add_products(vec (&acc)[ROWS][NV], const float* a, int64_t a_pitch,
                                                        const float* b, int64_t b_pitch, int depth,
                                                        const char* ahead, int64_t ahead_pitch) {
  int k = 0;
  auto step = [&]() __attribute__((always_inline)) {
    vec column[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) column[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] = add_product(acc[r][v], all(a[r * a_pitch + k]), column[v]);
    ++k, b += b_pitch;
  };
  for (int whole = depth / 16; whole > 0; --whole, ahead += ahead_pitch)
    for (int part = 0; part < 4; ++part) {
      __builtin_prefetch(ahead + part * 64);
      step(), step(), step(), step();
    }
  while (k < depth) step();
}

/// C [ROWS, NV vectors] = init + A [ROWS, depth] · B [depth, NV vectors]. The rows of init are `init_pitch`
/// apart; a null init is zero. C stays in registers until the end. ahead: see `add_products`.
template <int ROWS, int NV>
inline void tile(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int depth, float* c,
                 int64_t c_pitch, const float* init, int64_t init_pitch, const char* ahead,
                 int64_t ahead_pitch) {
  vec acc[ROWS][NV];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = init ? load(init + r * init_pitch + v * LANES) : vec{};
  add_products(acc, a, a_pitch, b, b_pitch, depth, ahead, ahead_pitch);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(c + r * c_pitch + v * LANES, acc[r][v]);
}

using Tile = decltype(&tile<1, 1>);

/// The function `tile` for this number of rows and vectors, which are at most TILE_ROWS and TILE_VECTORS.
inline Tile tile_of(int rows, int vectors) {
  static const Tile tiles[TILE_ROWS][4] = {
      {tile<1, 1>, tile<1, 2>, tile<1, 3>, tile<1, 4>}, {tile<2, 1>, tile<2, 2>, tile<2, 3>, tile<2, 4>},
      {tile<3, 1>, tile<3, 2>, tile<3, 3>, tile<3, 4>}, {tile<4, 1>, tile<4, 2>, tile<4, 3>, tile<4, 4>},
      {tile<5, 1>, tile<5, 2>, tile<5, 3>, tile<5, 4>}, {tile<6, 1>, tile<6, 2>, tile<6, 3>, tile<6, 4>},
  };
  return tiles[rows - 1][vectors - 1];
}

}  // namespace xl
