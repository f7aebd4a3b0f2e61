// A block of queries of one head against all keys that they see, a block of keys at a time.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "head.hpp"

namespace xl {

/// Memory that the next block reads. The tiles of the present block fetch it into the cache as they go: see
/// `tile`.
class Prefetch {
 public:
  static constexpr int64_t GROUP = 64;  // floats fetched together

  /// `groups` times GROUP floats, whose beginnings are `pitch` floats apart.
  struct Run {
    const float* from;
    int64_t pitch, groups;
  };

  void clear() { runs_left_ = 0; }

  /// Adds a run; at most four fit, and the last added is fetched first.
  void add(const float* from, int64_t pitch, int64_t groups) { runs_[runs_left_++] = {from, pitch, groups}; }

  /// Takes `groups` groups from the present run; it may end a little earlier, and reading on does no harm.
  /// Where no run is left, the tile gets `instead`, at which it fetches what is in the cache already.
  Run take(int64_t groups, const float* instead) {
    if (runs_left_ == 0) return {instead, 0, 0};
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

/// Transposes BLOCK rows of `width` floats: rows[i] becomes column i of packed [width, BLOCK].
template <class Stored>
inline void pack_columns(const Stored* const* rows, int64_t width, float* packed) {
  int64_t k = 0;
  for (; k + LANES <= width; k += LANES)
    for (int i = 0; i < BLOCK; i += LANES) {
      vec x[LANES];
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) x[lane] = load(rows[i + lane] + k);
      transpose(x);
#pragma GCC unroll 16
      for (int lane = 0; lane < LANES; ++lane) store(packed + (k + lane) * BLOCK + i, x[lane]);
    }
  for (; k < width; ++k)
    for (int i = 0; i < BLOCK; ++i) packed[k * BLOCK + i] = widened(rows[i][k]);
}

/// Copies the distances `top`, top - 1, … of a table [width, rows] into packed [width, BLOCK].
/// A distance beyond either end of the table takes the last row at that end.
template <class Tabled>
inline void pack_distances(const Tabled* table, int64_t width, int64_t rows, int64_t top, float* packed) {
  // Columns inside … outside - 1 lie within the table and are copied a vector at a time; the others are
  // clamped.
  const int64_t inside = std::clamp<int64_t>((top - rows + LANES) / LANES * LANES, 0, BLOCK);
  const int64_t outside = std::clamp<int64_t>((top + 1) / LANES * LANES, inside, BLOCK);
  for (int64_t k = 0; k < width; ++k, table += rows, packed += BLOCK) {
    for (int64_t i = inside; i < outside; i += LANES)
      store(packed + i, reversed(load(table + top - i - LANES + 1)));
    for (int64_t i = 0; i < inside; ++i)
      packed[i] = widened(table[std::clamp<int64_t>(top - i, 0, rows - 1)]);
    for (int64_t i = outside; i < BLOCK; ++i)
      packed[i] = widened(table[std::clamp<int64_t>(top - i, 0, rows - 1)]);
  }
}

inline int64_t whole_vectors(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

/// Queries first … first + count - 1 (count <= BLOCK) of one head, against all keys that they see.
///
/// Times are counted from query `first`. A key's weight is 2^(score - reference), with one reference for each
/// query. The reference is raised, and what was summed until then scaled down, only where a score exceeds it
/// by more than SLACK: most blocks of keys then need no scaling.
template <class Stored>
class Block {
 public:
  Block(const Head<Stored>& head, const Rule& rule, int64_t first, int64_t count, Scratch& scratch)
      : head_(head),
        rule_(rule),
        first_(first),
        count_(count),
        width_(head.width),
        padded_(whole_vectors(width_)) {
    float* at = scratch.take(BLOCK * (4 * width_ + 2 * padded_ + WIDE + 2 * TILE_ROWS + LANES + 2));
    auto next = [&at](int64_t floats) { return std::exchange(at, at + floats); };
    content_queries_ = next(BLOCK * width_), position_queries_ = next(BLOCK * width_);
    keys_ = next(BLOCK * width_), table_ = next(BLOCK * width_);
    padded_values_ = next(BLOCK * padded_), answers_ = next(BLOCK * padded_);
    distance_scores_ = next(BLOCK * WIDE);
    scores_ = next(BLOCK * TILE_ROWS), weights_ = next(BLOCK * TILE_ROWS), totals_ = next(BLOCK * LANES);
    bias_ = next(BLOCK), references_ = next(BLOCK);
    for (int64_t t = 0; t < count; ++t) {
      const float* q = head.query + (first + t) * head.query_pitch;
      for (int64_t k = 0; k < width_; ++k) {
        content_queries_[t * width_ + k] = (q[k] + (head.u ? head.u[k] : 0)) * LOG2E;
        position_queries_[t * width_ + k] = (q[k] + (head.v ? head.v[k] : 0)) * LOG2E;
      }
      longest_[t] = head.longest_distance(rule, first + t);
      earliest_ = std::min(earliest_, t - longest_[t]);
      longest_of_all_ = std::max(longest_of_all_, longest_[t]);
      references_[t] = NO_SCORE;
      store(totals_ + t * LANES, vec{});
    }
    std::memset(answers_, 0, BLOCK * padded_ * sizeof(float));
  }

  void run() {
    const int64_t end = count_ - rule_.nearest;  // no query sees a key at this time or later
    for (start_ = earliest_; start_ < end; start_ += BLOCK) {
      keys_here_ = std::min<int64_t>(BLOCK, end - start_);
      const int64_t slot = head_.slot(first_ + start_);
      prefetch_next_block(slot);
      score_distances();
      take_keys(slot);
      for_tiles([&](int64_t t, int64_t size) { answer(t, size); });
    }
    for (int64_t t = 0; t < count_; ++t) {
      const float total = sum(load(totals_ + t * LANES));
      const float factor =
          references_[t] > NO_SCORE ? 1 / total : 0;  // a query that sees no key answers zero
      for (int64_t k = 0; k < width_; ++k)
        head_.out[(first_ + t) * head_.out_pitch + k] = answers_[t * padded_ + k] * factor;
    }
  }

 private:
  static constexpr int64_t WIDE = 4 * BLOCK, COLUMNS = TILE_VECTORS * LANES;

  const Head<Stored>& head_;
  const Rule& rule_;
  const int64_t first_, count_, width_, padded_;
  float *content_queries_, *position_queries_;  // q + u and q + v, times log2(e) [count, width]
  float *keys_, *table_;                        // of this block of keys [width, BLOCK]
  float *padded_values_, *answers_;             // [BLOCK, padded]; the sum of weights · values so far
  float *distance_scores_, *bias_;              // [count, WIDE]: column base_ + c is for distance top() - c
  float *scores_, *weights_;                    // of a tile [TILE_ROWS, BLOCK]
  float *totals_, *references_;    // of each query: the sum of its weights by lanes [count, LANES]
  const float* values_ = nullptr;  // of this block of keys, rows `values_pitch_` apart
  int64_t values_pitch_ = 0, base_ = 0;
  int64_t start_ = 0, keys_here_ = 0;  // the time of the block's first key, and how many keys there are
  int64_t earliest_ = INT64_MAX;       // the earliest time that any query sees
  int64_t longest_of_all_ = 0;         // the longest distance that any query sees
  int64_t longest_[BLOCK];             // the longest distance that each query sees
  Prefetch prefetch_;

  bool has_distances() const { return head_.table || head_.half_table; }

  /// The largest distance between these queries and these keys.
  int64_t top() const { return BLOCK - 1 - start_; }

  /// Calls work(t, size) for tiles of queries of about the same size.
  template <class Work>
  void for_tiles(const Work& work) const {
    const int64_t tiles = (count_ + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t i = 0, t = 0; i < tiles; ++i) {
      const int64_t next = (i + 1) * count_ / tiles;
      work(t, next - t);
      t = next;
    }
  }

  /// c = init + a · b for one tile: see `tile`.
  void multiply(int64_t size, int64_t vectors, const float* a, int64_t a_pitch, const float* b,
                int64_t b_pitch, int64_t depth, float* c, int64_t c_pitch, const float* init,
                int64_t init_pitch) {
    const Prefetch::Run next = prefetch_.take(depth / 16, b);
    tile_of(size, vectors)(a, a_pitch, b, b_pitch, depth, c, c_pitch, init, init_pitch, next.from,
                           next.pitch);
  }

  /// Lists the next block's keys, values and distances for prefetching, where they lie side by side in
  /// memory.
  void prefetch_next_block(int64_t slot) {
    prefetch_.clear();
    if (slot + 2 * BLOCK <= head_.slots && head_.ring_pitch == width_)
      for (const Stored* side : {head_.values, head_.keys})
        prefetch_.add(reinterpret_cast<const float*>(side + (slot + BLOCK) * width_), Prefetch::GROUP,
                      BLOCK * width_ * sizeof(Stored) / (Prefetch::GROUP * sizeof(float)));
    if (const int64_t from = top() - 3 * BLOCK + 1; 0 <= from && from + BLOCK <= head_.rows) {
      if (head_.table)
        for (int64_t at = 0; at < BLOCK; at += Prefetch::GROUP)
          prefetch_.add(head_.table + from + at, head_.rows, width_);
      else if (head_.half_table &&
               head_.rows % 2 == 0)  // an odd number of halves is no whole number of floats
        prefetch_.add(reinterpret_cast<const float*>(head_.half_table + from), head_.rows / 2, width_);
    }
  }

  /// Scores the distances between the queries and this block of keys: (q + v)·r(d) + bias(d).
  ///
  /// Key i and query t have the distance of column BLOCK - 1 - t + i, so a block of keys needs 2 BLOCK
  /// columns. The next block of keys starts BLOCK columns further on: it keeps the first half and computes
  /// only the second.
  void score_distances() {
    if (start_ == earliest_) {
      score_distances_at(0);
    } else if (base_ + 3 * BLOCK <= WIDE) {
      base_ += BLOCK;
    } else {  // the row is used up: its last half moves to the beginning
      for (float* row = distance_scores_; row < distance_scores_ + count_ * WIDE; row += WIDE)
        std::memcpy(row, row + base_ + BLOCK, BLOCK * sizeof(float));
      base_ = 0;
    }
    score_distances_at(BLOCK);
  }

  void score_distances_at(int64_t column) {
    const int64_t top = this->top() - column;
    if (!has_distances() || top - BLOCK + 1 > longest_of_all_ || top < rule_.nearest) return;
    if (head_.table) pack_distances(head_.table, width_, head_.rows, top, table_);
    else pack_distances(head_.half_table, width_, head_.rows, top, table_);
    if (head_.bias) {
      pack_distances(head_.bias, 1, head_.rows, top, bias_);
      for (int64_t i = 0; i < BLOCK; ++i) bias_[i] *= LOG2E;
    }
    for (int64_t i = 0; i < BLOCK; i += COLUMNS) {
      if (top - i - COLUMNS + 1 > longest_of_all_ || top - i < rule_.nearest)
        continue;  // no query sees these
      for_tiles([&](int64_t t, int64_t size) {
        multiply(size, TILE_VECTORS, position_queries_ + t * width_, width_, table_ + i, BLOCK, width_,
                 distance_scores_ + t * WIDE + base_ + column + i, WIDE, head_.bias ? bias_ + i : nullptr, 0);
      });
    }
  }

  /// Packs this block's keys, and finds its values or copies them where they cannot be read in place.
  void take_keys(int64_t slot) {
    const Stored* rows[BLOCK];
    const int64_t pitch = head_.ring_pitch;
    for (int64_t i = 0; i < BLOCK; ++i) {  // rows beyond the last key repeat it; their scores are hidden
      const int64_t at = slot + std::min(i, keys_here_ - 1);
      rows[i] = head_.keys + (at < head_.slots ? at : at - head_.slots) * pitch;
    }
    pack_columns(rows, width_, keys_);
    if constexpr (std::is_same_v<Stored, float>) {
      values_ = head_.values + slot * pitch, values_pitch_ = pitch;
      if (slot + BLOCK <= head_.slots && padded_ == width_) return;
    }
    // Values are copied where they are halves, where the ring ends within the block, or where rows need zeros
    // behind them to be whole vectors.
    for (int64_t i = 0; i < BLOCK; ++i) {
      float* value = padded_values_ + i * padded_;
      copy(head_.values + (rows[i] - head_.keys), width_, value);
      std::fill(value + width_, value + padded_, 0.0f);
    }
    values_ = padded_values_, values_pitch_ = padded_;
  }

  /// Adds to queries t … t + size - 1 what they see in this block of keys.
  /// A later query sees neither an earlier first key nor an earlier last key than the query before it.
  void answer(int64_t t, int64_t size) {
    const int64_t last = t + size - 1;
    // The keys from … to - 1 are seen by at least one query of the tile.
    const int64_t from = std::max<int64_t>(t - start_ - longest_[t], 0);
    const int64_t to = std::min(last - start_ - rule_.nearest + 1, keys_here_);
    if (from >= to) return;
    for (int64_t i = from / COLUMNS * COLUMNS; i < to; i += COLUMNS)
      multiply(size, TILE_VECTORS, content_queries_ + t * width_, width_, keys_ + i, BLOCK, width_,
               scores_ + i, BLOCK,
               has_distances() ? distance_scores_ + t * WIDE + base_ + BLOCK - 1 - t + i : nullptr, WIDE - 1);
    // Weights are computed in whole vectors, so low … high - 1 may hold keys that some queries do not see.
    const int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
    if (last - start_ - longest_[last] > low || std::min(t - start_ - rule_.nearest + 1, keys_here_) < high)
      hide(t, size, low, high);
    if (high - low == BLOCK)
      weigh(t, size, 0, BLOCK);  // a case of its own, for which the compiler unrolls the loop
    else weigh(t, size, low, high);
    for (int64_t k = 0; k < padded_; k += COLUMNS)
      multiply(size, std::min<int64_t>(TILE_VECTORS, (padded_ - k) / LANES), weights_ + low, BLOCK,
               values_ + low * values_pitch_ + k, values_pitch_, high - low, answers_ + t * padded_ + k,
               padded_, answers_ + t * padded_ + k, padded_);
  }

  /// Sets the scores of keys that a query does not see to minus infinity.
  void hide(int64_t t, int64_t size, int64_t low, int64_t high) {
    for (int64_t r = t; r < t + size; ++r) {
      float* score = scores_ + (r - t) * BLOCK;
      const int64_t begins = std::clamp(r - start_ - longest_[r], low, high);
      const int64_t ends = std::clamp(std::min(r - start_ - rule_.nearest + 1, keys_here_), begins, high);
      std::fill(score + low, score + begins, -INFINITY);
      std::fill(score + ends, score + high, -INFINITY);
    }
  }

  /// Turns the scores low … high - 1 of a tile into weights. It is inlined, so that a whole block has no
  /// loop.
  __attribute__((always_inline)) void weigh(int64_t t, int64_t size, int64_t low, int64_t high) {
    vec sums[TILE_ROWS], excess = all(NO_SCORE);
    auto weigh_row = [&](int64_t r) __attribute__((always_inline)) {
      sums[r] = vec{};
#pragma GCC unroll 8
      for (int64_t i = low; i < high; i += LANES) {
        const vec x = load(scores_ + r * BLOCK + i) - references_[t + r], weight = exp2_of(x);
        excess = larger(x, excess);  // leaves out what is not a number
        store(weights_ + r * BLOCK + i, weight);
        sums[r] += weight;
      }
    };
    for (int64_t r = 0; r < size; ++r) weigh_row(r);
    // Weights beyond 2^SLACK would lose precision or overflow: those rows get a new reference and are weighed
    // again.
    if (largest(excess) > SLACK)
      for (int64_t r = 0; r < size; ++r) {
        raise_reference(t + r, scores_ + r * BLOCK, low, high);
        weigh_row(r);
      }
    for (int64_t r = 0; r < size; ++r)
      store(totals_ + (t + r) * LANES, load(totals_ + (t + r) * LANES) + sums[r]);
  }

  /// Makes the largest of a query's scores its reference, if it is larger, and scales down what was summed so
  /// far.
  void raise_reference(int64_t t, const float* score, int64_t low, int64_t high) {
    vec above = load(score + low);
    for (int64_t i = low + LANES; i < high; i += LANES) above = larger(above, load(score + i));
    const float most = largest(above);
    if (!(most > references_[t])) return;
    const float factor = std::exp2(references_[t] - most);
    for (int64_t k = 0; k < padded_; k += LANES)
      store(answers_ + t * padded_ + k, load(answers_ + t * padded_ + k) * factor);
    store(totals_ + t * LANES, load(totals_ + t * LANES) * factor);
    references_[t] = most;
  }
};

}  // namespace xl
