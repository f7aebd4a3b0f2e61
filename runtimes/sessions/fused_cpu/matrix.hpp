// Products with constant matrices, which are packed once, when a session opens.
//
// A matrix W [K, N] lies in panels of 8 vectors of columns, the last of them of 4 or 8. A panel of floats is in
// strips, as `tile` reads them. A panel of bytes or halves of bytes holds, for each k, the numbers of its columns
// side by side. They are widened to floats: for one row in registers, for several in memory. Activations are
// never rounded. One row and several add the same numbers in the same order, so a row gets the same bits in
// every batch.
//
// Byte v of 32 bits belongs to the v-th of 4 vectors of columns. A mask leaves w · 256^v of it, which is a float
// after one conversion; the scale of the v-th vector includes 256^-v. Only the last byte is shifted, because it
// has the sign. With 4 bits the lower half of a byte is for an even k and the upper half for the odd k behind
// it, which leaves 16 w.
//
// A number is scale · w - offset, with a scale and an offset for each column of a block of k. The sum of a block
// is scale · Σ x w - offset · Σ x, so scales and offsets are read once a block.
//
// Rows of activations begin a pitch apart. What is between the end of a row and the next one are zeros.
#pragma once

#include <memory>
#include <vector>

#include "head.hpp"

namespace xl {

constexpr int QUAD = 4;                        // vectors of columns that share 32 bits
constexpr int64_t QUAD_COLUMNS = QUAD * LANES;
constexpr int64_t DEPTH = 32;                  // values of k in a block of MatMulNBits
constexpr int64_t STRIP = TILE_VECTORS * LANES;  // columns of floats that lie side by side
constexpr int64_t PITCH = std::max(DEPTH, QUAD_COLUMNS);

inline int64_t pitch_of(int64_t columns) { return (columns + PITCH - 1) / PITCH * PITCH; }

struct bytes {};    // numbers of 8 bits, 4 in 32 bits for each k
struct nibbles {};  // numbers of 4 bits, 8 in 32 bits for each two k

/// Values of k that one vector of 32 bits is for.
template <class Number>
constexpr int TOGETHER = std::is_same_v<Number, nibbles> ? 2 : 1;

/// The numbers of vector v of columns and of the next k + odd, as `w` above.
template <class Number>
inline vec number_of(ivec quad, int v, int odd) {
  constexpr bool halves = std::is_same_v<Number, nibbles>;
  const ivec from = v == QUAD - 1 ? (ivec)((uvec)quad >> 24) : quad;
  const int mask = (halves ? odd ? 0xf0 : 0x0f : 0xff) << (v == QUAD - 1 ? 0 : 8 * v);
  return __builtin_convertvector(v == QUAD - 1 && !halves ? from : from & mask, vec);
}

/// What `number_of` is to be multiplied by.
inline float unit_of(int v) { return v == QUAD - 1 ? 1.0f : 1.0f / (1 << 8 * v); }

/// A panel of a packed matrix.
struct Panel {
  const void* values;             // as above, for `depth` values of k
  const float *scales, *offsets;  // [depth / block, columns], null for floats; the scales include `unit_of`
  int64_t depth, block;
};

/// total + scale · sum - offset · inputs, for a block with sum = Σ x w and inputs = Σ x.
inline vec add_block(vec total, vec sum, const float* scale, float inputs, const float* offset) {
  return add_product(add_product(total, sum, load(scale)), all(-inputs), load(offset));
}

inline float sum_of(const float* x, int64_t count) {
  vec total{};
  for (int64_t i = 0; i < count; i += LANES) total += load(x + i);
  return sum(total);
}

/// y = init + x [depth] · panel, for a panel of NV vectors of columns. inputs: the sums of x by block.
template <class Number, int NV>
__attribute__((noinline)) void multiply_row(const float* x, const float* inputs, const Panel& panel,
                                            const float* init, float* y) {
  constexpr int WIDTH = NV * LANES;
  vec total[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) total[v] = load(init + v * LANES);
  if constexpr (std::is_same_v<Number, float>) {
    const float* w = static_cast<const float*>(panel.values);
    const int64_t strip = panel.depth * STRIP;
    for (int64_t k = 0; k < panel.depth; ++k, w += STRIP)
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const float* numbers = w + v / TILE_VECTORS * strip + v % TILE_VECTORS * LANES;
        total[v] = add_product(total[v], all(x[k]), load(numbers));
      }
  } else {
    const ivec* quad = static_cast<const ivec*>(panel.values);
    const float *scales = panel.scales, *offsets = panel.offsets;
    for (int64_t first = 0; first < panel.depth; first += panel.block) {
      vec sums[NV] = {};
      for (int64_t k = first; k < first + panel.block; k += TOGETHER<Number>, quad += NV / QUAD)
#pragma GCC unroll 2
        for (int odd = 0; odd < TOGETHER<Number>; ++odd) {
          const float factor = odd ? x[k + 1] / 16 : x[k];
#pragma GCC unroll 8
          for (int v = 0; v < NV; ++v)
            sums[v] = add_product(sums[v], all(factor), number_of<Number>(quad[v / QUAD], v % QUAD, odd));
        }
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v)
        total[v] = add_block(total[v], sums[v], scales + v * LANES, *inputs, offsets + v * LANES);
      scales += WIDTH, offsets += WIDTH, ++inputs;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(y + v * LANES, total[v]);
}

/// Writes TILE_VECTORS vectors of a panel as floats, [depth, …]: those of every quad from vector FIRST of it.
template <class Number, int FIRST>
inline void widen_strip(const Panel& panel, int vectors, int quad_at, float* to) {
  const ivec* quads = static_cast<const ivec*>(panel.values) + quad_at;
  for (int64_t k = 0; k < panel.depth; k += TOGETHER<Number>, quads += vectors / QUAD)
#pragma GCC unroll 2
    for (int odd = 0; odd < TOGETHER<Number>; ++odd)
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; ++v, to += LANES) {
        const vec w = number_of<Number>(*quads, FIRST + v, odd);
        store(to, odd ? w * (1.0f / 16) : w);
      }
}

/// Writes the numbers of a panel as floats without their scales, in strips as `tile` reads them.
template <class Number>
inline void widen(const Panel& panel, int vectors, float* to) {
  const int64_t strip = panel.depth * STRIP;
  for (int quad = 0; quad < vectors / QUAD; ++quad, to += QUAD_COLUMNS * panel.depth) {
    widen_strip<Number, 0>(panel, vectors, quad, to);
    if constexpr (TILE_VECTORS < QUAD) widen_strip<Number, TILE_VECTORS>(panel, vectors, quad, to + strip);
  }
}
static_assert(QUAD == TILE_VECTORS || QUAD == 2 * TILE_VECTORS);

/// y [ROWS, STRIP] = init + x · strip, for a strip of widened numbers of a panel `width` wide. panel: with the
/// scales and offsets of the strip. inputs: the sums of x by row and block. ahead: see `add_products`.
template <int ROWS>
void multiply_blocks(const float* x, int64_t x_pitch, const float* strip, const Panel& panel, int64_t width,
                     const float* inputs, const float* init, int64_t init_pitch, float* y, int64_t y_pitch,
                     const char* ahead) {
  const int64_t blocks = panel.depth / panel.block;
  const float *scales = panel.scales, *offsets = panel.offsets;
  vec totals[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECTORS; ++v) totals[r][v] = load(init + r * init_pitch + v * LANES);
  for (int64_t b = 0; b < blocks; ++b) {
    vec sums[ROWS][TILE_VECTORS] = {};
    add_products(sums, x, x_pitch, strip, STRIP, static_cast<int>(panel.block), ahead, 256);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < TILE_VECTORS; ++v)
        totals[r][v] = add_block(totals[r][v], sums[r][v], scales + v * LANES, inputs[r * blocks + b],
                                 offsets + v * LANES);
    x += panel.block, strip += panel.block * STRIP, ahead += panel.block / 16 * 256;
    scales += width, offsets += width;
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < TILE_VECTORS; ++v) store(y + r * y_pitch + v * LANES, totals[r][v]);
}

/// By the number of rows.
constexpr decltype(&multiply_blocks<1>) BLOCK_TILES[TILE_ROWS] = {multiply_blocks<1>, multiply_blocks<2>,
                                                                  multiply_blocks<3>, multiply_blocks<4>,
                                                                  multiply_blocks<5>, multiply_blocks<6>};

/// A matrix as a graph holds it.
struct GivenMatrix {
  enum Form {
    FLOATS,  // [K, N], or [N, K] if `turned`
    BYTES,   // int8, likewise, with scales [N]
    BLOCKS   // uint8 [N, K / 32 rounded up, 4 · bits], as MatMulNBits reads it, with scales and zero points by
             // column and block
  };
  Form form;
  const void* values;
  const float* scales;
  const uint8_t* zero_points;  // two in a byte where there are 4 bits; each column begins a byte
  int64_t depth, columns;      // K and N
  bool turned;
  int bits;

  int64_t blocks() const { return form == BLOCKS ? (depth + DEPTH - 1) / DEPTH : 1; }
  /// Calls work(k, c, number) for all rows k of columns first + c, in the order in which they lie: floats, or
  /// whole numbers from 0 to 255 or 15.
  template <class Work>
  void read(int64_t first, int64_t count, const Work& work) const {
    const auto* bytes = static_cast<const uint8_t*>(values);
    const auto one = [&](int64_t k, int64_t c, int64_t i) {
      if (form == FLOATS) work(k, c, static_cast<const float*>(values)[i]);
      else if (form == BYTES) work(k, c, static_cast<const int8_t*>(values)[i] + 128);
      else work(k, c, bits == 8 ? bytes[i] : bytes[i / 2] >> (i % 2 * 4) & 15);
    };
    if (turned || form == BLOCKS) {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t k = 0; k < depth; ++k) one(k, c, (first + c) * depth + k);
    } else {
      for (int64_t k = 0; k < depth; ++k)
        for (int64_t c = 0; c < count; ++c) one(k, c, k * columns + first + c);
    }
  }
  float scale(int64_t n, int64_t block) const { return scales[n * blocks() + block]; }
  float zero_point(int64_t n, int64_t block) const {
    if (form == BYTES) return 128;
    if (bits == 8) return zero_points[n * blocks() + block];
    return zero_points[n * ((blocks() + 1) / 2) + block / 2] >> (block % 2 * 4) & 15;
  }
};

/// W [K, N] and a bias [N] of a product x·W + bias.
class Matrix {
 public:
  Matrix() = default;

  /// bias: null for zeros.
  Matrix(const GivenMatrix& given, const float* bias)
      : depth_(given.depth), columns_(given.columns), in_floats_(given.form == GivenMatrix::FLOATS),
        in_halves_(given.form == GivenMatrix::BLOCKS && given.bits == 4) {
    const int64_t width = pitch_of(columns_);
    padded_ = given.form == GivenMatrix::BLOCKS ? depth_ : pitch_of(depth_);
    block_ = given.form == GivenMatrix::BLOCKS ? DEPTH : padded_;
    bias_.assign(width, 0.0f);
    if (bias) std::copy_n(bias, columns_, bias_.begin());
    values_ = std::make_unique<Scratch>();
    const int64_t words = width * padded_ / (in_floats_ ? 1 : in_halves_ ? 8 : 4);
    std::memset(values_->take(words), 0, words * sizeof(float));
    if (!in_floats_) scales_.assign(width * (padded_ / block_), 0.0f), offsets_ = scales_;
    for (int64_t p = 0; p < panels(); ++p) pack(given, p);
  }

  explicit operator bool() const { return columns_ > 0; }
  int64_t depth() const { return depth_; }
  int64_t columns() const { return columns_; }
  const float* bias() const { return bias_.data(); }
  int64_t panels() const { return (columns_ + PANEL - 1) / PANEL; }
  int64_t first_column(int64_t p) const { return p * PANEL; }
  /// Vectors of columns in panel p.
  int vectors(int64_t p) const { return columns_ - first_column(p) > QUAD_COLUMNS ? 2 * QUAD : QUAD; }

  /// Blocks of a row that `multiply` needs the sums of.
  int64_t blocks() const { return in_floats_ ? 0 : padded_ / block_; }
  /// Writes the sums [rows, blocks] of x.
  void sum_inputs(int64_t rows, const float* x, int64_t x_pitch, float* inputs) const {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t b = 0; b < blocks(); ++b) *inputs++ = sum_of(x + r * x_pitch + b * block_, block_);
  }

  /// Multiplies rows of x by panel p: y = init + x · W. inputs: see `sum_inputs`. y and init point to the
  /// panel's first column; the rows of init are `init_pitch` apart. y may be init.
  void multiply(int64_t p, int64_t rows, const float* x, int64_t x_pitch, const float* inputs,
                const float* init, int64_t init_pitch, float* y, int64_t y_pitch, Scratch& scratch) const {
    const auto run = [&](auto number) {
      using Number = decltype(number);
      const bool whole = vectors(p) > QUAD;
      if (rows == 1)
        return (whole ? multiply_row<Number, 2 * QUAD> : multiply_row<Number, QUAD>)(x, inputs, panel(p),
                                                                                     init, y);
      const float* floats = static_cast<const float*>(panel(p).values);
      if constexpr (!std::is_same_v<Number, float>) {
        float* widened = scratch.take(padded_ * vectors(p) * LANES);
        widen<Number>(panel(p), vectors(p), widened);
        floats = widened;
      }
      multiply_rows(p, rows, x, x_pitch, floats, inputs, init, init_pitch, y, y_pitch);
    };
    if (in_floats_) run(0.0f);
    else if (in_halves_) run(nibbles{});
    else run(bytes{});
  }

 private:
  static constexpr int64_t PANEL = 2 * QUAD_COLUMNS;

  int64_t depth_ = 0, columns_ = 0, padded_ = 0, block_ = DEPTH;
  bool in_floats_ = true, in_halves_ = false;
  std::unique_ptr<Scratch> values_;  // aligned memory
  std::vector<float> scales_, offsets_, bias_;

  Panel panel(int64_t p) const {
    const int64_t before = first_column(p), scaled = before * (padded_ / block_);
    return {values_->take(0) + before * padded_ / (in_floats_ ? 1 : in_halves_ ? 8 : 4),
            scales_.data() + scaled, offsets_.data() + scaled, padded_, block_};
  }

  void pack(const GivenMatrix& given, int64_t p) {
    const Panel to = panel(p);
    const int64_t width = vectors(p) * LANES, first = first_column(p);
    float* floats = static_cast<float*>(const_cast<void*>(to.values));
    uint8_t* packed = static_cast<uint8_t*>(const_cast<void*>(to.values));
    const int64_t here = std::min(width, columns_ - first);
    // The byte of a column among those of one k, or of two.
    const auto place = [](int64_t c) {
      const int64_t v = c / LANES;
      return (v / QUAD * LANES + c % LANES) * QUAD + v % QUAD;
    };
    given.read(first, here, [&](int64_t k, int64_t c, auto number) {
      if (in_floats_) floats[(c / STRIP * padded_ + k) * STRIP + c % STRIP] = number;
      else if (in_halves_) packed[k / 2 * width + place(c)] |= static_cast<int>(number) << (k % 2 * 4);
      else packed[k * width + place(c)] = static_cast<uint8_t>(number);
    });
    for (int64_t b = 0; !in_floats_ && b < given.blocks(); ++b)
      for (int64_t c = 0; c < here; ++c) {
        const float scale = given.scale(first + c, b);
        const_cast<float*>(to.scales)[b * width + c] = scale * unit_of(c / LANES % QUAD);
        const_cast<float*>(to.offsets)[b * width + c] = scale * given.zero_point(first + c, b);
      }
  }

  /// Multiplies several rows by panel p, whose numbers are given as floats in strips.
  void multiply_rows(int64_t p, int64_t rows, const float* x, int64_t x_pitch, const float* strip,
                     const float* inputs, const float* init, int64_t init_pitch, float* y,
                     int64_t y_pitch) const {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, width = vectors(p) * LANES;
    for (int64_t at = 0; at < width; at += STRIP, strip += padded_ * STRIP) {
      const char* next_strip = reinterpret_cast<const char*>(strip + padded_ * STRIP);  // prefetched meanwhile
      Panel scaled = panel(p);
      scaled.scales += at, scaled.offsets += at;
      for (int64_t i = 0, r = 0; i < tiles; ++i) {
        const int64_t next = (i + 1) * rows / tiles;
        const char* ahead = next_strip + i * (padded_ / 16) * 256;
        const float *from = x + r * x_pitch, *before = init + r * init_pitch + at;
        float* to = y + r * y_pitch + at;
        if (in_floats_)
          tile_of(static_cast<int>(next - r), TILE_VECTORS)(from, x_pitch, strip, STRIP,
                                                            static_cast<int>(padded_), to, y_pitch, before,
                                                            init_pitch, ahead, 256);
        else
          BLOCK_TILES[next - r - 1](from, x_pitch, strip, scaled, width, inputs + r * blocks(), before,
                                    init_pitch, to, y_pitch, ahead);
        r = next;
      }
    }
  }
};

/// y = (x - mean) / sqrt(variance + epsilon) · weight + bias over a row of `width` numbers; y may be x.
inline void normalise(const float* x, int64_t width, const float* weight, const float* bias, float epsilon,
                      float* y) {
  vec total{};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) total += load(x + i);
  float mean = sum(total);
  for (; i < width; ++i) mean += x[i];
  mean /= width;
  total = vec{};
  for (i = 0; i + LANES <= width; i += LANES) {
    const vec off = load(x + i) - mean;
    total += off * off;
  }
  float variance = sum(total);
  for (; i < width; ++i) variance += (x[i] - mean) * (x[i] - mean);
  const float factor = 1 / std::sqrt(variance / width + epsilon);
  for (i = 0; i + LANES <= width; i += LANES)
    store(y + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
  for (; i < width; ++i) y[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

}  // namespace xl
