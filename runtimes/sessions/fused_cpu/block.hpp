// A block of queries of one head against all that they see, a block of keys at a time.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "head.hpp"

namespace xl {

/// Memory that is read next, for the tiles before that to fetch: see `tile`.
class Ahead {
 public:
  static constexpr int64_t GROUP = 64;  // floats fetched together

  struct Run {
    const float* from;
    int64_t pitch, groups;
  };

  void forget() { wanted_ = 0; }

  /// `groups` times GROUP floats, `pitch` apart; at most four such calls, of which the last is served first.
  void want(const float* from, int64_t pitch, int64_t groups) { runs_[wanted_++] = {from, pitch, groups}; }

  /// So many groups of what is wanted, or more than are; `instead` where nothing is.
  Run take(int64_t groups, const float* instead) {
    if (wanted_ == 0) return {instead, 0, 0};
    Run& run = runs_[wanted_ - 1];
    const Run taken = run;
    run.from += groups * run.pitch;
    if ((run.groups -= groups) <= 0) --wanted_;
    return taken;
  }

 private:
  Run runs_[4];
  int wanted_ = 0;
};

/// rows[i] (width floats) → column i of packed [width, BLOCK].
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

/// Distances `top`, top - 1, … of a table [width, rows] → packed [width, BLOCK]; those beyond either end are the last there.
template <class Tabled>
inline void pack_distances(const Tabled* table, int64_t width, int64_t rows, int64_t top, float* packed) {
  const int64_t inside = std::clamp<int64_t>((top - rows + LANES) / LANES * LANES, 0, BLOCK);  // vectors within the table
  const int64_t outside = std::clamp<int64_t>((top + 1) / LANES * LANES, inside, BLOCK);
  for (int64_t k = 0; k < width; ++k, table += rows, packed += BLOCK) {
    for (int64_t i = inside; i < outside; i += LANES) store(packed + i, reversed(load(table + top - i - LANES + 1)));
    for (int64_t i = 0; i < inside; ++i) packed[i] = widened(table[std::clamp<int64_t>(top - i, 0, rows - 1)]);
    for (int64_t i = outside; i < BLOCK; ++i) packed[i] = widened(table[std::clamp<int64_t>(top - i, 0, rows - 1)]);
  }
}

inline int64_t whole_vectors(int64_t floats) { return (floats + LANES - 1) / LANES * LANES; }

/// Queries first … first + count - 1 (count <= BLOCK) of one head against all that they see, a block of keys at a time.
///
/// Times are counted from query `first`. A row's weights are 2^(score - reference); the reference is raised, and what was summed
/// until then scaled down, only where a score passes it by more than SLACK.
template <class Stored>
class Block {
 public:
  Block(const Head<Stored>& head, const Rule& rule, int64_t first, int64_t count, Scratch& scratch)
      : head_(head), rule_(rule), first_(first), count_(count), width_(head.width), padded_(whole_vectors(width_)) {
    float* at = scratch.take(BLOCK * (4 * width_ + 2 * padded_ + WIDE + 2 * TILE_ROWS + LANES + 2));
    auto next = [&at](int64_t floats) { return std::exchange(at, at + floats); };
    content_ = next(BLOCK * width_), asking_ = next(BLOCK * width_), keys_ = next(BLOCK * width_), rows_ = next(BLOCK * width_);
    padded_values_ = next(BLOCK * padded_), answers_ = next(BLOCK * padded_), by_distance_ = next(BLOCK * WIDE);
    scores_ = next(BLOCK * TILE_ROWS), weights_ = next(BLOCK * TILE_ROWS), totals_ = next(BLOCK * LANES);
    bias_ = next(BLOCK), reference_ = next(BLOCK);
    for (int64_t t = 0; t < count; ++t) {
      const float* q = head.query + (first + t) * head.query_pitch;
      for (int64_t k = 0; k < width_; ++k) {
        content_[t * width_ + k] = (q[k] + (head.u ? head.u[k] : 0)) * LOG2E;
        asking_[t * width_ + k] = (q[k] + (head.v ? head.v[k] : 0)) * LOG2E;
      }
      seen_[t] = head.furthest(rule, first + t);
      begin_ = std::min(begin_, t - seen_[t]);
      reach_ = std::max(reach_, seen_[t]);
      reference_[t] = NONE;
      store(totals_ + t * LANES, vec{});
    }
    std::memset(answers_, 0, BLOCK * padded_ * sizeof(float));
  }

  void run() {
    const int64_t end = count_ - rule_.nearest;  // times from here on are seen by no query
    for (start_ = begin_; start_ < end; start_ += BLOCK) {
      number_ = std::min<int64_t>(BLOCK, end - start_);
      const int64_t slot = head_.slot(first_ + start_);
      fetch_after(slot);
      score_distances();
      take_keys(slot);
      for_tiles([&](int64_t t, int64_t size) { answer(t, size); });
    }
    for (int64_t t = 0; t < count_; ++t) {
      const float whole = sum(load(totals_ + t * LANES)), factor = reference_[t] > NONE ? 1 / whole : 0;
      for (int64_t k = 0; k < width_; ++k) head_.out[(first_ + t) * head_.out_pitch + k] = answers_[t * padded_ + k] * factor;
    }
  }

 private:
  static constexpr int64_t WIDE = 4 * BLOCK, COLUMNS = TILE_VECTORS * LANES;

  const Head<Stored>& head_;
  const Rule& rule_;
  const int64_t first_, count_, width_, padded_;
  float *content_, *asking_;               // (q + u), (q + v) [count, width], times log2(e)
  float *keys_, *rows_;                    // keys and table of this block [width, BLOCK]
  float *padded_values_, *answers_;        // [BLOCK, padded]; weights · values so far
  float *by_distance_, *bias_;             // [count, WIDE]: from column `base_`, column c holds the score of distance top() - c
  float *scores_, *weights_;               // of a tile [TILE_ROWS, BLOCK]
  float *totals_, *reference_;             // of each query: the sum of its weights by lanes [count, LANES]
  const float* values_ = nullptr;          // this block's, `values_pitch_` apart
  int64_t values_pitch_ = 0, base_ = 0;
  int64_t start_ = 0, number_ = 0;         // the time of the block's first key; how many there are
  int64_t begin_ = INT64_MAX, reach_ = 0;  // the earliest time and the longest distance that a query sees
  int64_t seen_[BLOCK];                    // the longest distance of each
  Ahead ahead_;

  bool has_distances() const { return head_.table || head_.half_table; }

  int64_t top() const { return BLOCK - 1 - start_; }  // of the distances between these queries and these keys

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

  void multiply(int64_t size, int64_t vectors, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch, int64_t depth,
                float* c, int64_t c_pitch, const float* init, int64_t init_pitch) {
    const Ahead::Run next = ahead_.take(depth / 16, b);
    tile_of(size, vectors)(a, a_pitch, b, b_pitch, depth, c, c_pitch, init, init_pitch, next.from, next.pitch);
  }

  /// Has the next block's keys, values and distances fetched, where they lie side by side.
  void fetch_after(int64_t slot) {
    ahead_.forget();
    if (slot + 2 * BLOCK <= head_.slots && head_.ring_pitch == width_)
      for (const Stored* side : {head_.values, head_.keys})
        ahead_.want(reinterpret_cast<const float*>(side + (slot + BLOCK) * width_), Ahead::GROUP,
                    BLOCK * width_ * sizeof(Stored) / (Ahead::GROUP * sizeof(float)));
    if (const int64_t from = top() - 3 * BLOCK + 1; 0 <= from && from + BLOCK <= head_.rows) {
      if (head_.table)
        for (int64_t at = 0; at < BLOCK; at += Ahead::GROUP) ahead_.want(head_.table + from + at, head_.rows, width_);
      else if (head_.half_table && head_.rows % 2 == 0)  // else rows are no whole number of floats apart
        ahead_.want(reinterpret_cast<const float*>(head_.half_table + from), head_.rows / 2, width_);
    }
  }

  /// Key i of query t is at column BLOCK - 1 - t + i. The next block of keys is BLOCK columns further; its last half is new.
  void score_distances() {
    if (start_ == begin_) {
      score_distances_at(0);
    } else if (base_ + 3 * BLOCK <= WIDE) {
      base_ += BLOCK;
    } else {
      for (float* row = by_distance_; row < by_distance_ + count_ * WIDE; row += WIDE)
        std::memcpy(row, row + base_ + BLOCK, BLOCK * sizeof(float));
      base_ = 0;
    }
    score_distances_at(BLOCK);
  }

  void score_distances_at(int64_t column) {
    const int64_t top = this->top() - column;
    if (!has_distances() || top - BLOCK + 1 > reach_ || top < rule_.nearest) return;
    if (head_.table) pack_distances(head_.table, width_, head_.rows, top, rows_);
    else pack_distances(head_.half_table, width_, head_.rows, top, rows_);
    if (head_.bias) {
      pack_distances(head_.bias, 1, head_.rows, top, bias_);
      for (int64_t i = 0; i < BLOCK; ++i) bias_[i] *= LOG2E;
    }
    for (int64_t i = 0; i < BLOCK; i += COLUMNS) {
      if (top - i - COLUMNS + 1 > reach_ || top - i < rule_.nearest) continue;
      for_tiles([&](int64_t t, int64_t size) {
        multiply(size, TILE_VECTORS, asking_ + t * width_, width_, rows_ + i, BLOCK, width_,
                 by_distance_ + t * WIDE + base_ + column + i, WIDE, head_.bias ? bias_ + i : nullptr, 0);
      });
    }
  }

  void take_keys(int64_t slot) {
    const Stored* rows[BLOCK];
    const int64_t pitch = head_.ring_pitch;
    for (int64_t i = 0; i < BLOCK; ++i) {
      const int64_t at = slot + std::min(i, number_ - 1);
      rows[i] = head_.keys + (at < head_.slots ? at : at - head_.slots) * pitch;
    }
    pack_columns(rows, width_, keys_);
    if constexpr (std::is_same_v<Stored, float>) {
      values_ = head_.values + slot * pitch, values_pitch_ = pitch;
      if (slot + BLOCK <= head_.slots && padded_ == width_) return;
    }
    for (int64_t i = 0; i < BLOCK; ++i) {  // halves, or the ring ends within the block, or rows need zeros behind them
      float* value = padded_values_ + i * padded_;
      copy(head_.values + (rows[i] - head_.keys), width_, value);
      std::fill(value + width_, value + padded_, 0.0f);
    }
    values_ = padded_values_, values_pitch_ = padded_;
  }

  /// Adds what `size` queries from t on find in this block. What one sees begins and ends no earlier than for the one before it.
  void answer(int64_t t, int64_t size) {
    const int64_t last = t + size - 1;
    const int64_t from = std::max<int64_t>(t - start_ - seen_[t], 0), to = std::min(last - start_ - rule_.nearest + 1, number_);
    if (from >= to) return;
    for (int64_t i = from / COLUMNS * COLUMNS; i < to; i += COLUMNS)
      multiply(size, TILE_VECTORS, content_ + t * width_, width_, keys_ + i, BLOCK, width_, scores_ + i, BLOCK,
               has_distances() ? by_distance_ + t * WIDE + base_ + BLOCK - 1 - t + i : nullptr, WIDE - 1);
    const int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
    if (last - start_ - seen_[last] > low || std::min(t - start_ - rule_.nearest + 1, number_) < high) hide(t, size, low, high);
    if (high - low == BLOCK) weigh(t, size, 0, BLOCK);
    else weigh(t, size, low, high);
    for (int64_t k = 0; k < padded_; k += COLUMNS)
      multiply(size, std::min<int64_t>(TILE_VECTORS, (padded_ - k) / LANES), weights_ + low, BLOCK,
               values_ + low * values_pitch_ + k, values_pitch_, high - low, answers_ + t * padded_ + k, padded_,
               answers_ + t * padded_ + k, padded_);
  }

  /// Sets the scores that are not seen to minus infinity.
  void hide(int64_t t, int64_t size, int64_t low, int64_t high) {
    for (int64_t r = t; r < t + size; ++r) {
      float* score = scores_ + (r - t) * BLOCK;
      const int64_t begins = std::clamp(r - start_ - seen_[r], low, high);
      const int64_t ends = std::clamp(std::min(r - start_ - rule_.nearest + 1, number_), begins, high);
      std::fill(score + low, score + begins, -INFINITY);
      std::fill(score + ends, score + high, -INFINITY);
    }
  }

  /// Scores low … high - 1 of a tile → weights; inlined, so that a whole block has no loop.
  __attribute__((always_inline)) void weigh(int64_t t, int64_t size, int64_t low, int64_t high) {
    vec sums[TILE_ROWS], over = all(NONE);
    auto weigh_row = [&](int64_t r) __attribute__((always_inline)) {
      sums[r] = vec{};
#pragma GCC unroll 8
      for (int64_t i = low; i < high; i += LANES) {
        const vec x = load(scores_ + r * BLOCK + i) - reference_[t + r], weight = exp2_of(x);
        over = larger(x, over);  // which leaves out what is not a number
        store(weights_ + r * BLOCK + i, weight);
        sums[r] += weight;
      }
    };
    for (int64_t r = 0; r < size; ++r) weigh_row(r);
    if (largest(over) > SLACK)
      for (int64_t r = 0; r < size; ++r) {
        raise(t + r, scores_ + r * BLOCK, low, high);
        weigh_row(r);
      }
    for (int64_t r = 0; r < size; ++r) store(totals_ + (t + r) * LANES, load(totals_ + (t + r) * LANES) + sums[r]);
  }

  /// Makes the largest of a query's scores its reference, if it is larger than that.
  void raise(int64_t t, const float* score, int64_t low, int64_t high) {
    vec above = load(score + low);
    for (int64_t i = low + LANES; i < high; i += LANES) above = larger(above, load(score + i));
    const float most = largest(above);
    if (!(most > reference_[t])) return;
    const float factor = std::exp2(reference_[t] - most);
    for (int64_t k = 0; k < padded_; k += LANES) store(answers_ + t * padded_ + k, load(answers_ + t * padded_ + k) * factor);
    store(totals_ + t * LANES, load(totals_ + t * LANES) * factor);
    reference_[t] = most;
  }
};

}  // namespace xl
