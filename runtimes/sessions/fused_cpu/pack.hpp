// What a block of queries reads, in the order in which it reads it: keys and distances as columns, and what
// the next block needs on its way into the cache.
#pragma once

#include <type_traits>

#include "head.hpp"

namespace xl {

/// Memory that the next block reads. The tiles of the present block fetch it into the cache as they go: see
/// `tile`.
class Prefetch {
 public:
  static constexpr int64_t GROUP_BYTES = 256;  // fetched together

  /// `groups` times GROUP_BYTES bytes, whose beginnings are `pitch` bytes apart.
  struct Run {
    const char* from;
    int64_t pitch, groups;
  };

  void clear() { runs_left_ = 0; }

  /// Adds a run; at most four fit, and the last added is fetched first.
  void add(const char* from, int64_t pitch, int64_t groups) { runs_[runs_left_++] = {from, pitch, groups}; }

  /// Takes `groups` groups from the present run; it may end a little earlier, and reading on does no harm.
  /// Where no run is left, the tile gets `instead`, at which it fetches what is in the cache already.
  Run take(int64_t groups, const float* instead) {
    if (runs_left_ == 0) return {reinterpret_cast<const char*>(instead), 0, 0};
    Run& run = runs_[runs_left_ - 1];
    const Run taken = run;
    run.from += groups * run.pitch;
    if ((run.groups -= groups) <= 0) --runs_left_;
    return taken;
  }

 private:
  Run runs_[4];
  int runs_left_ = 0;
};

/// Transposes BLOCK_TOKENS rows of `width` numbers: rows[i] becomes column i of packed [width, BLOCK_TOKENS]. Rows of
/// bytes are multiplied by their scales [BLOCK_TOKENS].
template <class Stored>
inline void pack_columns(const Stored* const* rows, int64_t width, float* packed,
                         const float* scales = nullptr) {
  constexpr bool SCALED = std::is_same_v<Stored, int8_t>;
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES)
    for (int i = 0; i < BLOCK_TOKENS; i += LANES) {
      vec x[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) x[lane] = load(rows[i + lane] + k);
      transpose(x);
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane)
        store(packed + (k + lane) * BLOCK_TOKENS + i, SCALED ? x[lane] * load(scales + i) : x[lane]);
    }
  for (; k < width; ++k)
    for (int i = 0; i < BLOCK_TOKENS; ++i)
      packed[k * BLOCK_TOKENS + i] = SCALED ? widened(rows[i][k]) * scales[i] : widened(rows[i][k]);
}

/// Copies the distances `top`, top - 1, … of a table [width, rows] into packed [width, BLOCK_TOKENS].
/// A distance beyond either end of the table takes the last row at that end.
/// Bytes are multiplied by their distances' scales, which are packed already.
template <class Tabled>
inline void pack_distances(const Tabled* table, int64_t width, int64_t rows, int64_t top, float* packed,
                           const float* scales = nullptr) {
  constexpr bool SCALED = std::is_same_v<Tabled, int8_t>;
  // Columns inside … outside - 1 lie within the table and are copied a vector at a time; the others are
  // clamped.
  const int64_t inside = std::clamp<int64_t>((top - rows + LANES) / LANES * LANES, 0, BLOCK_TOKENS);
  const int64_t outside = std::clamp<int64_t>((top + 1) / LANES * LANES, inside, BLOCK_TOKENS);
  for (int64_t k = 0; k < width; ++k, table += rows, packed += BLOCK_TOKENS) {
    for (int64_t i = inside; i < outside; i += LANES)
      store(packed + i, reversed(load(table + top - i - LANES + 1)));
    for (int64_t i = 0; i < inside; ++i)
      packed[i] = widened(table[std::clamp<int64_t>(top - i, 0, rows - 1)]);
    for (int64_t i = outside; i < BLOCK_TOKENS; ++i)
      packed[i] = widened(table[std::clamp<int64_t>(top - i, 0, rows - 1)]);
    if constexpr (SCALED)
      for (int64_t i = 0; i < BLOCK_TOKENS; i += LANES) store(packed + i, load(packed + i) * load(scales + i));
  }
}

inline int64_t whole_vectors(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

/// Copies columns first, first + 1, … of a table [width, columns] into packed [width, BLOCK_TOKENS]; columns beyond
/// the last one repeat it. Bytes are multiplied by their columns' scales, which are packed already.
template <class Number>
inline void pack_vectors(const Number* table, int64_t width, int64_t columns, int64_t first, float* packed,
                         const float* scales = nullptr) {
  const int64_t here = std::min<int64_t>(BLOCK_TOKENS, columns - first);
  for (int64_t k = 0; k < width; ++k, packed += BLOCK_TOKENS) {
    copy(table + k * columns + first, here, packed);
    std::fill(packed + here, packed + BLOCK_TOKENS, packed[here - 1]);
    if (std::is_same_v<Number, int8_t>)
      for (int64_t i = 0; i < BLOCK_TOKENS; ++i) packed[i] *= scales[i];
  }
}

}  // namespace xl
