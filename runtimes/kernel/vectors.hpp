// Vectors of floats as wide as the processor that this was compiled for, and the few kernels that attention is made of.
#pragma once

#include <cstdint>
#include <cstring>

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
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));  // at any address

inline vec load(const float* at) { return *reinterpret_cast<const loose*>(at); }
inline void store(float* at, vec x) { *reinterpret_cast<loose*>(at) = x; }
inline vec all(float x) { return x - vec{}; }
inline vec larger(vec a, vec b) { return a > b ? a : b; }

inline ivec zip_index(int first) {  // first, L + first, first + 1, L + first + 1, …
  ivec index{};
  for (int i = 0; i < LANES; ++i) index[i] = first + i / 2 + (i % 2) * LANES;
  return index;
}

/// Transposes LANES × LANES: perfect shuffles, log2(LANES) times.
inline void transpose(vec (&x)[LANES]) {
  const ivec low = zip_index(0), high = zip_index(LANES / 2);
  for (int stage = 1; stage < LANES; stage *= 2) {
    vec y[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; ++i) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + LANES / 2], low);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + LANES / 2], high);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) x[i] = y[i];
  }
}

/// The sum of each of LANES vectors, as one vector in their order.
inline vec sums(vec (&x)[LANES]) {
  const ivec low = zip_index(0), high = zip_index(LANES / 2);
#pragma GCC unroll 4
  for (int half = LANES / 2; half >= 1; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i)
      x[i] = __builtin_shuffle(x[i], x[i + half], low) + __builtin_shuffle(x[i], x[i + half], high);
  }
  return x[0];
}

inline ivec turn_index(int by) {
  ivec index{};
  for (int i = 0; i < LANES; ++i) index[i] = i ^ by;
  return index;
}

inline vec reversed(vec x) { return __builtin_shuffle(x, turn_index(LANES - 1)); }

inline float sum(vec x) {
#pragma GCC unroll 4
  for (int by = LANES / 2; by >= 1; by /= 2) x += __builtin_shuffle(x, turn_index(by));
  return x[0];
}

inline float largest(vec x) {
#pragma GCC unroll 4
  for (int by = LANES / 2; by >= 1; by /= 2) x = larger(x, __builtin_shuffle(x, turn_index(by)));
  return x[0];
}

/// e^x for x <= 0 to about 1e-7 of itself where that matters: 2^n · 2^r with |r| <= 1/2; never less than 2^-126.
inline vec exp_of(vec x) {
  const vec rounder = all(12582912.0f), power = larger(x * 1.44269504f, all(-126.0f));
  const vec shifted = power + rounder, r = power - (shifted - rounder);
  vec y = all(1.5403530e-4f);
  y = y * r + 1.3333558e-3f;
  y = y * r + 9.6181291e-3f;
  y = y * r + 5.5504109e-2f;
  y = y * r + 2.4022651e-1f;
  y = y * r + 6.9314718e-1f;
  y = y * r + 1.0f;
  return (vec)((ivec)y + ((ivec)shifted << 23));  // the low bits of the rounded sum are n
}

/// C [ROWS, NV vectors] = init + A [ROWS, depth] · B [depth, NV vectors]; init's rows are `init_pitch` apart, and null is zero.
template <int ROWS, int NV>
inline void tile(const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int depth, float* c, int64_t c_pitch,
                 const float* init, int64_t init_pitch) {
  vec acc[ROWS][NV];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = init ? load(init + r * init_pitch + v * LANES) : vec{};
  for (int k = 0; k < depth; ++k, b += b_pitch) {
    vec column[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) column[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[r][v] += a[r * a_pitch + k] * column[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) store(c + r * c_pitch + v * LANES, acc[r][v]);
}

typedef void (*Tile)(const float*, int64_t, const float*, int64_t, int, float*, int64_t, const float*, int64_t);

/// The tile of so many rows and vectors, at most TILE_ROWS and TILE_VECTORS.
inline Tile tile_of(int rows, int vectors) {
  static const Tile tiles[TILE_ROWS][4] = {
      {tile<1, 1>, tile<1, 2>, tile<1, 3>, tile<1, 4>}, {tile<2, 1>, tile<2, 2>, tile<2, 3>, tile<2, 4>},
      {tile<3, 1>, tile<3, 2>, tile<3, 3>, tile<3, 4>}, {tile<4, 1>, tile<4, 2>, tile<4, 3>, tile<4, 4>},
      {tile<5, 1>, tile<5, 2>, tile<5, 3>, tile<5, 4>}, {tile<6, 1>, tile<6, 2>, tile<6, 3>, tile<6, 4>},
  };
  return tiles[rows - 1][vectors - 1];
}

}  // namespace xl
