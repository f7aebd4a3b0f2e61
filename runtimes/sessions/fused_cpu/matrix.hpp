// Products with constant matrices, which are packed once, when a session opens.
//
// A matrix W [K, N] is cut into panels of 4 or 8 vectors of columns. A panel of floats is cut into strips of
// TILE_VECTORS vectors, as `tile` reads them.
//
// Weights of 8 or 4 bits are multiplied as whole numbers. Each row of activations is rounded to x = scale · q, with
// one scale for the row and |q| up to MOST_ROUNDED. Weights of the preset int8-stored need products as exact as in
// floats: a second number then holds what the first one leaves, x = scale · (q + rest / REST_SCALE). Sums of whole
// numbers are exact, and the sums of blocks are always added in the same order. So a row gets the same bits in every
// batch.
//
// Layout of such a panel: for each GROUP values of k, its strips follow one another. A strip has GROUP words for each of
// LANES columns, as `Sums` reads them. A word holds the weights of as many columns as fit into it, each of another
// vector of columns: A + 2^bits B + …, and its last weight is signed: w - 2^(bits - 1).
//
// No weight is masked: the word is multiplied as it is, then shifted right by `bits`, so that it begins with B, and so
// on. A's sum is the word's sum less 2^bits times the sum of the shifted word. Both may overflow their 32 bits; the
// difference is exact, because A's sum does not.
//
// A weight is scale · (w - zero), with a scale and a zero point for each column and block of k. They lie behind the
// strips of their block, as floats and as 16-bit numbers: so a panel is read once, from its beginning to its end. The
// sum of a block is scale · (Σ q w - zero · Σ q).
//
// Rows of activations begin a pitch apart. The numbers between the end of a row and the next row are zeros.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

#include "head.hpp"
#include "products.hpp"

namespace xl {

constexpr int QUAD = 4;  // a panel has 4 or 8 vectors of columns
constexpr int64_t QUAD_COLUMNS = QUAD * LANES;
constexpr int64_t BLOCK_DEPTH = 32;       // values of k in a block of MatMulNBits
constexpr int64_t MAX_BLOCK_DEPTH = 256;  // of any block: a sum of this many products of 8 and 16 bits fits into 32
constexpr int64_t STRIP_COLUMNS = TILE_VECTORS * LANES;  // of a strip of floats
constexpr int PREFETCH_BYTES = 2048;                     // how far before its use a weight is fetched into the cache
constexpr int64_t PITCH_MULTIPLE = std::max(BLOCK_DEPTH, QUAD_COLUMNS);

inline int64_t pitch_of(int64_t columns) { return (columns + PITCH_MULTIPLE - 1) / PITCH_MULTIPLE * PITCH_MULTIPLE; }

/// Kinds of weights. BITS: of a weight. TERMS: whole numbers for each activation.
struct nibbles {
  static constexpr int BITS = 4, TERMS = 1;
};
struct bytes {
  static constexpr int BITS = 8, TERMS = 1;
};
struct exact_bytes {
  static constexpr int BITS = 8, TERMS = 2;
};

/// Vectors of columns in a strip of such weights.
constexpr int together(int bits) { return WORD_BITS / bits; }

constexpr int64_t COLUMN_TAIL_BYTES = sizeof(float) + sizeof(int16_t);  // behind the strips of a block

/// A panel of a packed matrix.
struct Panel {
  const char* values;  // as above, for `depth` values of k
  int64_t depth, block;
};

/// Rows of activations as whole numbers; see above.
struct Rounded {
  const int16_t* numbers;  // [rows, terms, pitch], in groups
  const float* scales;     // [rows]
  const int32_t* sums;     // of the numbers of each block, [rows, terms, blocks]
  int64_t pitch, blocks, terms;

  Rounded from(int64_t row) const {
    return {numbers + row * terms * pitch, scales + row, sums + row * terms * blocks, pitch, blocks, terms};
  }
};

constexpr float REST_SCALE = 2 * MOST_ROUNDED;  // as |x / scale - q| is 1/2 at most

/// Rounds a row to one or two terms, and returns its scale; what is not finite makes the scale not a number.
inline float round(const float* x, int64_t count, int terms, int16_t* to) {
  const float most = largest_magnitude(x, count);
  const float factor = most > 1e-30f ? MOST_ROUNDED / most : 0;
  const vec rounder = all(12582912.0f);  // the low bits of the sum are the whole number
  for (int64_t i = 0; i < count; i += LANES) {
    vec left = load(x + i) * factor;
    for (int term = 0; term < terms; ++term) {
      const vec shifted = left + rounder;
      const shorts q = __builtin_convertvector((ivec)shifted, shorts);
      std::memcpy(to + term * count + i, &q, sizeof(q));
      left = (left - (shifted - rounder)) * REST_SCALE;
    }
  }
  return most / MOST_ROUNDED;
}

/// The sum of `count` whole numbers, which are a multiple of 2 LANES.
inline int32_t sum_of(const int16_t* numbers, int64_t count) {
  const ivec ones = 0x00010001 - ivec{};
  ivec total{};
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    ivec pairs;
    std::memcpy(&pairs, numbers + i, sizeof(pairs));
    total = add_pairs(total, pairs, ones);
  }
  return folded(total, [](ivec a, ivec b) { return a + b; });
}

/// y = init + x [depth] · panel, for a panel of NV vectors of columns, by floats.
template <int NV>
__attribute__((noinline)) void multiply_row(const float* x, const Panel& panel, const float* init, float* y) {
  vec total[NV];
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) total[v] = load(init + v * LANES);
  const float* w = reinterpret_cast<const float*>(panel.values);
  const int64_t strip = panel.depth * STRIP_COLUMNS;
  for (int64_t k = 0; k < panel.depth; ++k, w += STRIP_COLUMNS)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const float* numbers = w + v / TILE_VECTORS * strip + v % TILE_VECTORS * LANES;
      total[v] = add_product(total[v], all(x[k]), load(numbers));
    }
#pragma GCC unroll 8
  for (int v = 0; v < NV; ++v) store(y + v * LANES, total[v]);
}

/// y [ROWS, NV vectors] = init + x · W, for columns `at` and on of a panel that is `width` columns wide.
template <class Number, int ROWS, int NV>
__attribute__((noinline)) void multiply_rounded(const Rounded& x, const Panel& panel, int64_t at, int64_t width,
                                                const float* init, int64_t init_pitch, float* y,
                                                int64_t y_pitch) {
  constexpr int BITS = Number::BITS, TERMS = Number::TERMS, TOGETHER = together(BITS);
  if (ROWS == 1) at = 0, width = NV * LANES;  // one row is multiplied by the whole panel: constants for the compiler
  const int64_t strips = width / (TOGETHER * LANES), strip = at / (TOGETHER * LANES);
  vec totals[ROWS][NV] = {};
  const char* block = panel.values;
  for (int64_t first = 0, b = 0; first < panel.depth; first += panel.block, ++b) {
    const int64_t end = std::min(first + panel.block, panel.depth);
    const Strip* values = reinterpret_cast<const Strip*>(block) + strip;
    Sums sums[ROWS][TERMS][NV] = {};
#pragma GCC unroll 2
    for (int64_t k = first; k < end; k += GROUP, values += strips) {
      for (int byte = 0; ROWS == 1 && byte < NV / TOGETHER * int(sizeof(Strip)); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(values) + PREFETCH_BYTES + byte);
#pragma GCC unroll 8
      for (int s = 0; s < NV / TOGETHER; ++s)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
          for (int term = 0; term < TERMS; ++term) {
            const Activations q(x.numbers + (r * TERMS + term) * x.pitch + k);
#pragma GCC unroll 4
            for (int v = 0; v < TOGETHER; ++v) sums[r][term][s * TOGETHER + v].add(q, values[s].shifted(v * BITS));
          }
    }
    const auto* scales = reinterpret_cast<const float*>(values - strip);
    const auto* zeros = reinterpret_cast<const int16_t*>(scales + width);
    block = reinterpret_cast<const char*>(zeros + width);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const ivec zero = load_whole(zeros + at + v * LANES);
      const vec scale = load(scales + at + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        vec parts[TERMS];
#pragma GCC unroll 2
        for (int term = 0; term < TERMS; ++term) {
          ivec sum = sums[r][term][v].total();
          if ((v + 1) % TOGETHER) sum -= sums[r][term][v + 1].total() << BITS;
          parts[term] = __builtin_convertvector(sum - zero * x.sums[(r * TERMS + term) * x.blocks + b], vec);
        }
        if (TERMS == 2) parts[0] = add_product(parts[0], parts[TERMS - 1], all(1 / REST_SCALE));
        totals[r][v] = add_product(totals[r][v], parts[0], scale);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v)
      store(y + r * y_pitch + v * LANES,
            add_product(load(init + r * init_pitch + v * LANES), all(x.scales[r]), totals[r][v]));
}

/// Functions that multiply rows by one strip. of: by the number of rows. rows: the most. As they are 3 or more, no
/// tile of several rows has only one.
template <class Number>
struct Tiles {
  static constexpr int vectors = std::max(together(Number::BITS), 2);
  static constexpr int rows = 2 * TILE_ROWS / (vectors * Number::TERMS);
  static_assert(rows >= 3);
  static constexpr decltype(&multiply_rounded<Number, 2, vectors>) of[TILE_ROWS + 1] = {
      nullptr,
      nullptr,
      multiply_rounded<Number, 2, vectors>,
      multiply_rounded<Number, 3, vectors>,
      multiply_rounded<Number, std::min(rows, 4), vectors>,
      multiply_rounded<Number, std::min(rows, 5), vectors>,
      multiply_rounded<Number, std::min(rows, 6), vectors>};
};

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

  int64_t blocks() const { return form == BLOCKS ? (depth + BLOCK_DEPTH - 1) / BLOCK_DEPTH : 1; }
  /// Calls work(k, c, number) for all rows k of columns first + c, in the order in which they lie: floats, or
  /// whole numbers from 0 to 255 or 15.
  template <class Work>
  void read(int64_t first, int64_t count, const Work& work) const {
    // Each kind of number has loops of its own, without a choice inside: a session that opens reads every weight.
    const auto* bytes = static_cast<const uint8_t*>(values);
    if (form == FLOATS) each(first, count, work, [f = static_cast<const float*>(values)](int64_t i) { return f[i]; });
    else if (form == BYTES) each(first, count, work, [bytes](int64_t i) { return int8_t(bytes[i]) + 128; });
    else if (bits == 8) each(first, count, work, [bytes](int64_t i) { return int{bytes[i]}; });
    else each(first, count, work, [bytes](int64_t i) { return bytes[i / 2] >> (i % 2 * 4) & 15; });
  }
  float scale(int64_t n, int64_t block) const { return scales[form == BYTES ? n : n * blocks() + block]; }
  float zero_point(int64_t n, int64_t block) const {
    if (form == BYTES) return 128;
    if (bits == 8) return zero_points[n * blocks() + block];
    return zero_points[n * ((blocks() + 1) / 2) + block / 2] >> (block % 2 * 4) & 15;
  }

 private:
  template <class Work, class Number>
  void each(int64_t first, int64_t count, const Work& work, const Number& number) const {
    const int64_t rows = depth, pitch = columns;  // what `work` writes could be these members, to a compiler
    if (turned || form == BLOCKS) {
      for (int64_t c = 0; c < count; ++c)
        for (int64_t k = 0; k < rows; ++k) work(k, c, number((first + c) * rows + k));
    } else {
      for (int64_t k = 0; k < rows; ++k)
        for (int64_t c = 0; c < count; ++c) work(k, c, number(k * pitch + first + c));
    }
  }
};

/// W [K, N] and a bias [N] of a product x·W + bias.
class Matrix {
 public:
  Matrix() = default;

  /// bias: null for zeros.
  Matrix(const GivenMatrix& given, const float* bias)
      : depth_(given.depth), columns_(given.columns) {
    form_ = given.form == GivenMatrix::FLOATS  ? FLOATS
            : given.form == GivenMatrix::BYTES ? EXACT_BYTES
            : given.bits == 8                  ? BYTES
                                               : NIBBLES;
    const int64_t width = pitch_of(columns_);
    padded_ = given.form == GivenMatrix::BLOCKS ? depth_ : pitch_of(depth_);
    block_ = given.form == GivenMatrix::BLOCKS ? BLOCK_DEPTH : std::min(MAX_BLOCK_DEPTH, padded_);
    bias_.assign(width, 0.0f);
    if (bias) std::copy_n(bias, columns_, bias_.begin());
    values_ = std::make_unique<Scratch>();
    std::memset(values_->take(width * column_bytes() / sizeof(float)), 0, width * column_bytes());
    for (int64_t p = 0; p < panels(); ++p) pack(given, p);
  }

  explicit operator bool() const { return columns_ > 0; }
  int64_t depth() const { return depth_; }
  int64_t columns() const { return columns_; }
  const float* bias() const { return bias_.data(); }
  int64_t panels() const { return (columns_ + panel_columns() - 1) / panel_columns(); }
  int64_t first_column(int64_t p) const { return p * panel_columns(); }
  int64_t panel_bytes() const { return panel_columns() * column_bytes(); }
  /// Vectors of columns in panel p.
  int vectors(int64_t p) const {
    return std::min(panel_columns(), columns_ - first_column(p)) > QUAD_COLUMNS ? 2 * QUAD : QUAD;
  }

  /// Blocks of a column, each with a scale and a zero point; none of floats.
  int64_t blocks() const { return form_ == FLOATS ? 0 : (padded_ + block_ - 1) / block_; }

  /// Rounds rows of x for `multiply`, in working memory that is used until then; nothing for floats.
  Rounded rounded(int64_t rows, const float* x, int64_t x_pitch, Scratch& scratch) const {
    if (form_ == FLOATS) return {};
    const int64_t blocks = this->blocks();
    const int terms = form_ == EXACT_BYTES ? 2 : 1;
    float* scales = scratch.take(rows * (1 + terms * (blocks + padded_ / 2)));
    auto* sums = reinterpret_cast<int32_t*>(scales + rows);
    auto* numbers = reinterpret_cast<int16_t*>(sums + rows * terms * blocks);
    for (int64_t r = 0; r < rows; ++r) {
      int16_t* q = numbers + r * terms * padded_;
      scales[r] = round(x + r * x_pitch, padded_, terms, q);
      for (int term = 0; term < terms; ++term, q += padded_)
        for (int64_t b = 0, from = 0; b < blocks; ++b, from += block_)
          sums[(r * terms + term) * blocks + b] = sum_of(q + from, std::min(block_, padded_ - from));
    }
    group(numbers, rows * terms * padded_);
    return {numbers, scales, sums, padded_, blocks, terms};
  }

  /// Multiplies rows by panel p: y = init + x · W. q: what `rounded` returned for x. y and init point to the panel's
  /// first column; the rows of init are `init_pitch` apart. y may be init.
  void multiply(int64_t p, int64_t rows, const float* x, int64_t x_pitch, const Rounded& q, const float* init,
                int64_t init_pitch, float* y, int64_t y_pitch) const {
    if (form_ == NIBBLES) multiply_rounded_rows<nibbles>(p, rows, q, init, init_pitch, y, y_pitch);
    else if (form_ == BYTES) multiply_rounded_rows<bytes>(p, rows, q, init, init_pitch, y, y_pitch);
    else if (form_ == EXACT_BYTES) multiply_rounded_rows<exact_bytes>(p, rows, q, init, init_pitch, y, y_pitch);
    else if (rows > 1) multiply_rows(p, rows, x, x_pitch, init, init_pitch, y, y_pitch);
    else (vectors(p) > QUAD ? multiply_row<2 * QUAD> : multiply_row<QUAD>)(x, panel(p), init, y);
  }

 private:
  /// The form in which the matrix is packed.
  enum Form { FLOATS, EXACT_BYTES, BYTES, NIBBLES };

  Form form_ = FLOATS;
  int64_t depth_ = 0, columns_ = 0, padded_ = 0, block_ = BLOCK_DEPTH;
  std::unique_ptr<Scratch> values_;  // aligned memory
  std::vector<float> bias_;

  int bits() const { return form_ == FLOATS ? 32 : form_ == NIBBLES ? 4 : 8; }
  int64_t column_bytes() const { return padded_ * bits() / 8 + blocks() * COLUMN_TAIL_BYTES; }

  /// With two terms, the sums of half a panel use all registers.
  int64_t panel_columns() const { return form_ == EXACT_BYTES ? QUAD_COLUMNS : 2 * QUAD_COLUMNS; }

  Panel panel(int64_t p) const {
    return {reinterpret_cast<const char*>(values_->take(0)) + first_column(p) * column_bytes(), padded_, block_};
  }

  void pack(const GivenMatrix& given, int64_t p) {
    const int64_t width = vectors(p) * LANES, first = first_column(p), here = std::min(width, columns_ - first);
    char* panel = const_cast<char*>(this->panel(p).values);
    float* floats = reinterpret_cast<float*>(panel);
    auto* packed = reinterpret_cast<std::make_unsigned_t<Word>*>(panel);
    const int bits = form_ == NIBBLES ? 4 : 8, last = together(bits) - 1;  // in a word
    // The place of a number is a sum of what its row and its column add. `above` is its first bit there, and `less`
    // what a signed weight is smaller by.
    int64_t across[2 * QUAD_COLUMNS], above[2 * QUAD_COLUMNS], less[2 * QUAD_COLUMNS];
    for (int64_t c = 0; c < here; ++c) {
      const int64_t strip = c / LANES / (last + 1), v = c / LANES % (last + 1);
      across[c] = form_ == FLOATS ? c / STRIP_COLUMNS * padded_ * STRIP_COLUMNS + c % STRIP_COLUMNS
                                  : (strip * LANES + c % LANES) * GROUP;
      above[c] = v * bits, less[c] = v == last ? 1 << (bits - 1) : 0;
    }
    // In words: the distance between groups, and what lies behind a block.
    const int64_t pitch = width / (last + 1) * GROUP, behind = width * COLUMN_TAIL_BYTES / sizeof(Word);
    given.read(first, here, [&](int64_t k, int64_t c, auto number) {
      if constexpr (std::is_same_v<decltype(number), float>) {
        floats[k * STRIP_COLUMNS + across[c]] = number;
      } else {  // divided by constants: a division by a variable would take longer than all else here
        const int64_t b = form_ == EXACT_BYTES ? k / MAX_BLOCK_DEPTH : k / BLOCK_DEPTH;
        packed[k / GROUP * pitch + k % GROUP + b * behind + across[c]] |= (number ^ less[c]) << above[c];
      }
    });
    for (int64_t b = 0; b < blocks(); ++b) {
      auto* scales = reinterpret_cast<float*>(packed + std::min((b + 1) * block_, padded_) / GROUP * pitch + b * behind);
      auto* zeros = reinterpret_cast<int16_t*>(scales + width);
      for (int64_t c = 0; c < here; ++c) {
        scales[c] = given.scale(first + c, b);
        zeros[c] = given.zero_point(first + c, b) - less[c];
      }
    }
  }

  /// Multiplies several rows of floats by panel p, a strip of it and a tile of rows at a time.
  void multiply_rows(int64_t p, int64_t rows, const float* x, int64_t x_pitch, const float* init,
                     int64_t init_pitch, float* y, int64_t y_pitch) const {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, width = vectors(p) * LANES;
    const float* strip = reinterpret_cast<const float*>(panel(p).values);
    for (int64_t at = 0; at < width; at += STRIP_COLUMNS, strip += padded_ * STRIP_COLUMNS) {
      const char* next_strip = reinterpret_cast<const char*>(strip + padded_ * STRIP_COLUMNS);  // prefetched meanwhile
      for (int64_t i = 0, r = 0; i < tiles; ++i) {
        const int64_t next = (i + 1) * rows / tiles;
        tile_of(static_cast<int>(next - r), TILE_VECTORS)(
            x + r * x_pitch, x_pitch, strip, STRIP_COLUMNS, static_cast<int>(padded_), y + r * y_pitch + at, y_pitch,
            init + r * init_pitch + at, init_pitch, next_strip + i * (padded_ / 16) * 256, 256);
        r = next;
      }
    }
  }

  /// The same for rows of whole numbers.
  template <class Number>
  void multiply_rounded_rows(int64_t p, int64_t rows, const Rounded& q, const float* init, int64_t init_pitch,
                             float* y, int64_t y_pitch) const {
    const int64_t tiles = (rows + Tiles<Number>::rows - 1) / Tiles<Number>::rows, width = vectors(p) * LANES;
    const Panel panel = this->panel(p);
    if (rows == 1)
      return (vectors(p) > QUAD ? multiply_rounded<Number, 1, 2 * QUAD> : multiply_rounded<Number, 1, QUAD>)(
          q, panel, 0, width, init, init_pitch, y, y_pitch);
    for (int64_t at = 0; at < width; at += Tiles<Number>::vectors * LANES)
      for (int64_t i = 0, r = 0; i < tiles; ++i) {
        const int64_t next = (i + 1) * rows / tiles;
        Tiles<Number>::of[next - r](q.from(r), panel, at, width, init + r * init_pitch + at, init_pitch,
                                    y + r * y_pitch + at, y_pitch);
        r = next;
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
