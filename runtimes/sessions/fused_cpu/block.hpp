// A block of queries of one head against all keys that they see, a block of keys at a time.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "pack.hpp"

namespace xl {

/// Queries first … first + count - 1 (count <= BLOCK_TOKENS) of one head, against all keys that they see.
///
/// Times are counted from query `first`. A key's weight is 2^(score - reference), with one reference for each
/// query. The reference is raised, and what was summed until then scaled down, only where a score exceeds it
/// by more than MAX_EXCESS: most blocks of keys then need no scaling. A block of persistent vectors is like
/// one of keys, without distances and seen by every query.
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
    float* at = scratch.take(BLOCK_TOKENS * (4 * width_ + 2 * padded_ + DISTANCE_COLUMNS + 2 * TILE_ROWS +
                                             2 * LANES + 6));
    auto next = [&at](int64_t floats) { return std::exchange(at, at + floats); };
    content_queries_ = next(BLOCK_TOKENS * width_), position_queries_ = next(BLOCK_TOKENS * width_);
    keys_ = next(BLOCK_TOKENS * width_), table_ = next(BLOCK_TOKENS * width_);
    padded_values_ = next(BLOCK_TOKENS * padded_), answers_ = next(BLOCK_TOKENS * padded_);
    distance_scores_ = next(BLOCK_TOKENS * DISTANCE_COLUMNS);
    scores_ = next(BLOCK_TOKENS * TILE_ROWS), weights_ = next(BLOCK_TOKENS * TILE_ROWS);
    totals_ = next(BLOCK_TOKENS * LANES), ungated_ = next(BLOCK_TOKENS * LANES);
    gates_ = next(2 * BLOCK_TOKENS);
    bias_ = next(BLOCK_TOKENS), references_ = next(BLOCK_TOKENS), scales_ = next(BLOCK_TOKENS);
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
      store(totals_ + t * LANES, vec{}), store(ungated_ + t * LANES, vec{});
    }
    std::memset(answers_, 0, BLOCK_TOKENS * padded_ * sizeof(float));
  }

  void run() {
    for (int64_t n = 0; n < head_.persistent; n += BLOCK_TOKENS) {
      keys_here_ = std::min<int64_t>(BLOCK_TOKENS, head_.persistent - n);
      take_persistent(n);
      for_tiles([&](int64_t t, int64_t size) { answer_persistent(t, size); });
    }
    const int64_t end = count_ - rule_.nearest;  // no query sees a key at this time or later
    for (start_ = earliest_; start_ < end; start_ += BLOCK_TOKENS) {
      keys_here_ = std::min<int64_t>(BLOCK_TOKENS, end - start_);
      const int64_t slot = head_.slot(first_ + start_);
      prefetch_next_block(slot);
      score_distances();
      if (head_.gate)
        for (int64_t half : {0, BLOCK_TOKENS})
          pack_distances(head_.gate, 1, head_.rows, top() - half, gates_ + half);
      take_keys(slot);
      for_tiles([&](int64_t t, int64_t size) { answer(t, size); });
    }
    for (int64_t t = 0; t < count_; ++t) {
      float total = sum(load(totals_ + t * LANES));
      if (head_.gate) total += rule_.epsilon * sum(load(ungated_ + t * LANES));
      const float factor =
          references_[t] > NO_SCORE ? 1 / total : 0;  // a query that sees no key answers zero
      for (int64_t k = 0; k < width_; ++k)
        head_.out[(first_ + t) * head_.out_pitch + k] = answers_[t * padded_ + k] * factor;
    }
  }

 private:
  static constexpr int64_t DISTANCE_COLUMNS = 4 * BLOCK_TOKENS, COLUMNS = TILE_VECTORS * LANES;

  const Head<Stored>& head_;
  const Rule& rule_;
  const int64_t first_, count_, width_, padded_;
  float *content_queries_, *position_queries_;  // q + u and q + v, times log2(e) [count, width]
  float *keys_, *table_;                        // of this block of keys [width, BLOCK_TOKENS]
  float *padded_values_, *answers_;             // [BLOCK_TOKENS, padded]; the sum of weights · values so far
  float *distance_scores_, *bias_;  // [count, DISTANCE_COLUMNS]: column base_ + c is for distance top() - c
  float *scores_, *weights_;                    // of a tile [TILE_ROWS, BLOCK_TOKENS]
  float *totals_, *ungated_;       // by lanes [count, LANES]: sums of weights, and of those before the gate
  float *references_, *gates_;     // gates_ [2 BLOCK_TOKENS]: column c is for distance top() - c
  float* scales_;                  // of this block's distances or keys, if they are bytes
  const float* values_ = nullptr;  // of this block of keys, rows `values_pitch_` apart
  int64_t values_pitch_ = 0, base_ = 0;
  int64_t start_ = 0, keys_here_ = 0;  // the time of the block's first key, and how many keys there are
  int64_t earliest_ = INT64_MAX;       // the earliest time that any query sees
  int64_t longest_of_all_ = 0;         // the longest distance that any query sees
  int64_t longest_[BLOCK_TOKENS];             // the longest distance that each query sees
  Prefetch prefetch_;

  bool has_distances() const { return head_.table || head_.bias; }

  /// The largest distance between these queries and these keys.
  int64_t top() const { return BLOCK_TOKENS - 1 - start_; }

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

  /// Lists the next block's keys, values and distances for prefetching, if they are contiguous in memory.
  void prefetch_next_block(int64_t slot) {
    prefetch_.clear();
    if (slot + 2 * BLOCK_TOKENS <= head_.slots && head_.ring_pitch == width_)
      for (const Stored* side : {head_.values, head_.keys})
        prefetch_.add(reinterpret_cast<const char*>(side + (slot + BLOCK_TOKENS) * width_), Prefetch::GROUP_BYTES,
                      BLOCK_TOKENS * width_ * sizeof(Stored) / Prefetch::GROUP_BYTES);
    const int64_t from = top() - 3 * BLOCK_TOKENS + 1, size = head_.table.size();
    if (head_.table && 0 <= from && from + BLOCK_TOKENS <= head_.rows)
      for (int64_t at = 0; at < BLOCK_TOKENS * size; at += Prefetch::GROUP_BYTES)
        prefetch_.add(static_cast<const char*>(head_.table.data) + from * size + at, head_.rows * size,
                      width_);
  }

  /// Scores the distances between the queries and this block of keys: (q + v)·r(d) + bias(d).
  ///
  /// Key i and query t have the distance of column BLOCK_TOKENS - 1 - t + i, so a block of keys needs 2 BLOCK_TOKENS
  /// columns. The next block of keys starts BLOCK_TOKENS columns further on: it keeps the first half and computes
  /// only the second.
  void score_distances() {
    if (start_ == earliest_) {
      score_distances_at(0);
    } else if (base_ + 3 * BLOCK_TOKENS <= DISTANCE_COLUMNS) {
      base_ += BLOCK_TOKENS;
    } else {  // the row is used up: its last half moves to the beginning
      for (float* row = distance_scores_; row < distance_scores_ + count_ * DISTANCE_COLUMNS; row += DISTANCE_COLUMNS)
        std::memcpy(row, row + base_ + BLOCK_TOKENS, BLOCK_TOKENS * sizeof(float));
      base_ = 0;
    }
    score_distances_at(BLOCK_TOKENS);
  }

  void score_distances_at(int64_t column) {
    const int64_t top = this->top() - column;
    if (!has_distances() || top - BLOCK_TOKENS + 1 > longest_of_all_ || top < rule_.nearest) return;
    if (head_.table_scales) pack_distances(head_.table_scales, 1, head_.rows, top, scales_);
    head_.table.as([&](auto* table) { pack_distances(table, width_, head_.rows, top, table_, scales_); });
    const int64_t depth = head_.table ? width_ : 0;  // without position vectors the scores are just the bias
    if (head_.bias) {
      pack_distances(head_.bias, 1, head_.rows, top, bias_);
      for (int64_t i = 0; i < BLOCK_TOKENS; ++i) bias_[i] *= LOG2E;
    }
    for (int64_t i = 0; i < BLOCK_TOKENS; i += COLUMNS) {
      if (top - i - COLUMNS + 1 > longest_of_all_ || top - i < rule_.nearest)
        continue;  // no query sees these
      for_tiles([&](int64_t t, int64_t size) {
        multiply(size, TILE_VECTORS, position_queries_ + t * width_, width_, table_ + i, BLOCK_TOKENS, depth,
                 distance_scores_ + t * DISTANCE_COLUMNS + base_ + column + i, DISTANCE_COLUMNS,
                 head_.bias ? bias_ + i : nullptr, 0);
      });
    }
  }

  /// Packs this block's keys, and finds its values or copies them where they cannot be read in place.
  void take_keys(int64_t slot) {
    int64_t slots[BLOCK_TOKENS];
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {  // rows beyond the last key repeat it; their scores are hidden
      const int64_t at = slot + std::min(i, keys_here_ - 1);
      slots[i] = at < head_.slots ? at : at - head_.slots;
    }
    // Keys of times before the stream have an initial value instead of what lies in their slots.
    const int64_t time = head_.position + first_ + start_;
    const int64_t before = head_.initial_key && time < 0 ? time < -keys_here_ ? keys_here_ : -time : 0;
    const Stored* rows[BLOCK_TOKENS];
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
      rows[i] = head_.keys + slots[i] * head_.ring_pitch;
      if (head_.key_scales) scales_[i] = head_.key_scales[slots[i]];
    }
    pack_columns(rows, width_, keys_, scales_);
    take_values(head_.values, head_.ring_pitch, head_.value_scales, slots,
                before == 0 && slot + BLOCK_TOKENS <= head_.slots);
    if (before == 0) return;
    for (int64_t k = 0; k < width_; ++k) std::fill_n(keys_ + k * BLOCK_TOKENS, before, head_.initial_key[k]);
    for (int64_t i = 0; i < before; ++i)
      std::memcpy(padded_values_ + i * padded_, head_.initial_value, width_ * sizeof(float));
  }

  /// Packs persistent keys n … n + keys_here_ - 1, and finds or copies their values.
  void take_persistent(int64_t n) {
    int64_t places[BLOCK_TOKENS];
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
      places[i] = n + std::min(i, keys_here_ - 1);
      if (head_.persistent_key_scales) scales_[i] = head_.persistent_key_scales[places[i]];
    }
    head_.persistent_keys.as(
        [&](auto* keys) { pack_vectors(keys, width_, head_.persistent, n, keys_, scales_); });
    head_.persistent_values.as([&](auto* values) {
      take_values(values, width_, head_.persistent_value_scales, places, keys_here_ == BLOCK_TOKENS);
    });
    if (!head_.u) return;
    // Their scores are q·k, and the packed queries are q + u: the bias takes u·k away.
    std::fill_n(bias_, BLOCK_TOKENS, 0.0f);
    for (int64_t k = 0; k < width_; ++k)
      for (int64_t i = 0; i < BLOCK_TOKENS; ++i) bias_[i] -= head_.u[k] * LOG2E * keys_[k * BLOCK_TOKENS + i];
  }

  /// Takes the values in these rows where they lie, if they are `side_by_side`, are floats and need no zeros
  /// behind them to be whole vectors. Others are copied.
  template <class Number>
  void take_values(const Number* values, int64_t pitch, const float* scales, const int64_t* places,
                   bool side_by_side) {
    if constexpr (std::is_same_v<Number, float>) {
      values_ = values + places[0] * pitch, values_pitch_ = pitch;
      if (side_by_side && padded_ == width_) return;
    }
    for (int64_t i = 0; i < BLOCK_TOKENS; ++i) {
      float* value = padded_values_ + i * padded_;
      copy(values + places[i] * pitch, width_, value);
      if (std::is_same_v<Number, int8_t>)
        for (int64_t k = 0; k < width_; ++k) value[k] *= scales[places[i]];
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
    const int64_t column = BLOCK_TOKENS - 1 - t;  // of the first query's distance from the first key
    const float* of_distances = distance_scores_ + t * DISTANCE_COLUMNS + base_ + column;
    score(t, size, from, to, has_distances() ? of_distances : nullptr, DISTANCE_COLUMNS - 1);
    // Weights are computed in whole vectors, so low … high - 1 may hold keys that some queries do not see.
    const int64_t low = from / LANES * LANES, high = (to + LANES - 1) / LANES * LANES;
    if (last - start_ - longest_[last] > low || std::min(t - start_ - rule_.nearest + 1, keys_here_) < high)
      hide(t, size, low, high);
    if (head_.gate) weigh<true>(t, size, low, high, gates_ + column);
    else if (high - low == BLOCK_TOKENS) weigh<false>(t, size, 0, BLOCK_TOKENS);  // apart, so that it is unrolled
    else weigh<false>(t, size, low, high);
    add_values(t, size, low, high);
  }

  /// Adds to queries t … t + size - 1 this block of persistent vectors, which all of them see.
  void answer_persistent(int64_t t, int64_t size) {
    const int64_t high = whole_vectors(keys_here_);
    score(t, size, 0, keys_here_, head_.u ? bias_ : nullptr, 0);
    for (int64_t r = 0; r < size; ++r)
      std::fill(scores_ + r * BLOCK_TOKENS + keys_here_, scores_ + r * BLOCK_TOKENS + high, -INFINITY);
    weigh<false>(t, size, 0, high);
    add_values(t, size, 0, high);
  }

  /// Scores of a tile for keys from … to - 1: `init` plus the products of queries and keys.
  void score(int64_t t, int64_t size, int64_t from, int64_t to, const float* init, int64_t init_pitch) {
    for (int64_t i = from / COLUMNS * COLUMNS; i < to; i += COLUMNS)
      multiply(size, TILE_VECTORS, content_queries_ + t * width_, width_, keys_ + i, BLOCK_TOKENS, width_,
               scores_ + i, BLOCK_TOKENS, init ? init + i : nullptr, init_pitch);
  }

  void add_values(int64_t t, int64_t size, int64_t low, int64_t high) {
    for (int64_t k = 0; k < padded_; k += COLUMNS)
      multiply(size, std::min<int64_t>(TILE_VECTORS, (padded_ - k) / LANES), weights_ + low, BLOCK_TOKENS,
               values_ + low * values_pitch_ + k, values_pitch_, high - low, answers_ + t * padded_ + k,
               padded_, answers_ + t * padded_ + k, padded_);
  }

  /// Sets the scores of keys that a query does not see to minus infinity.
  void hide(int64_t t, int64_t size, int64_t low, int64_t high) {
    for (int64_t r = t; r < t + size; ++r) {
      float* score = scores_ + (r - t) * BLOCK_TOKENS;
      const int64_t begins = std::clamp(r - start_ - longest_[r], low, high);
      const int64_t ends = std::clamp(std::min(r - start_ - rule_.nearest + 1, keys_here_), begins, high);
      std::fill(score + low, score + begins, -INFINITY);
      std::fill(score + ends, score + high, -INFINITY);
    }
  }

  /// Turns the scores low … high - 1 of a tile into weights. It is inlined, so that a whole block has no
  /// loop. gates: of the first query of the tile, by key, if the weights are gated.
  template <bool BY_GATE>
  __attribute__((always_inline)) void weigh(int64_t t, int64_t size, int64_t low, int64_t high,
                                            const float* gates = nullptr) {
    vec sums[TILE_ROWS], ungated[TILE_ROWS], excess = all(NO_SCORE);
    auto weigh_row = [&](int64_t r) __attribute__((always_inline)) {
      sums[r] = ungated[r] = vec{};
#pragma GCC unroll 8
      for (int64_t i = low; i < high; i += LANES) {
        const vec x = load(scores_ + r * BLOCK_TOKENS + i) - references_[t + r];
        vec weight = exp2_of(x);
        excess = larger(x, excess);  // leaves out what is not a number
        if (BY_GATE) ungated[r] += weight, weight *= load(gates + i - r);
        store(weights_ + r * BLOCK_TOKENS + i, weight);
        sums[r] += weight;
      }
    };
    for (int64_t r = 0; r < size; ++r) weigh_row(r);
    // Weights beyond 2^MAX_EXCESS would lose precision or overflow: those rows get a new reference and are
    // weighed again.
    if (largest(excess) > MAX_EXCESS)
      for (int64_t r = 0; r < size; ++r) {
        raise_reference(t + r, scores_ + r * BLOCK_TOKENS, low, high);
        weigh_row(r);
      }
    for (int64_t r = 0; r < size; ++r) {
      store(totals_ + (t + r) * LANES, load(totals_ + (t + r) * LANES) + sums[r]);
      float* before_gate = ungated_ + (t + r) * LANES;
      if (head_.gate) store(before_gate, load(before_gate) + (BY_GATE ? ungated[r] : sums[r]));
    }
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
    if (head_.gate) store(ungated_ + t * LANES, load(ungated_ + t * LANES) * factor);
    references_[t] = most;
  }
};

}  // namespace xl
