// Draws the next token from logits: greedily, or with temperature, top-k and top-p. The random numbers are
// those of NumPy's default_rng([seed, row]), so the same seed draws the same tokens as the Python package
// from the same logits.
#ifndef XL_EXPORT_SAMPLER_HPP
#define XL_EXPORT_SAMPLER_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "error.hpp"

namespace xl_export {

// NumPy's generator PCG64 (O'Neill 2014, XSL-RR 128/64), seeded by NumPy's SeedSequence of [seed, row].
class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t row = 0) {
    std::vector<std::uint32_t> entropy;
    for (std::uint64_t number : {seed, row}) {
      entropy.push_back(static_cast<std::uint32_t>(number));
      if (number >> 32) entropy.push_back(static_cast<std::uint32_t>(number >> 32));
    }
    const auto words = seed_words(entropy);
    const Wide start = {words[0], words[1]}, stream = {words[2], words[3]};
    step_ = {stream.high << 1 | stream.low >> 63, stream.low << 1 | 1};
    advance();
    state_ = sum(state_, start);
    advance();
  }

  // A number from 0 to 1, 1 excluded, of 53 random bits.
  double next() {
    advance();
    const std::uint64_t mixed = state_.high ^ state_.low;
    const unsigned turn = static_cast<unsigned>(state_.high >> 58);
    const std::uint64_t bits = mixed >> turn | mixed << ((64 - turn) & 63);
    return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0);
  }

 private:
  struct Wide {
    std::uint64_t high = 0, low = 0;
  };

  static Wide sum(Wide a, Wide b) {
    const std::uint64_t low = a.low + b.low;
    return {a.high + b.high + (low < a.low), low};
  }

  static Wide product(std::uint64_t a, std::uint64_t b) {
    const std::uint64_t mask = 0xffffffff, al = a & mask, ah = a >> 32, bl = b & mask, bh = b >> 32;
    const std::uint64_t low = al * bl, middle = ah * bl + (low >> 32), other = al * bh + (middle & mask);
    return {ah * bh + (middle >> 32) + (other >> 32), a * b};
  }

  void advance() {
    constexpr Wide factor = {0x2360ed051fc65da4, 0x4385df649fccf645};
    Wide next = product(state_.low, factor.low);
    next.high += state_.high * factor.low + state_.low * factor.high;
    state_ = sum(next, step_);
  }

  // The 64-bit words that SeedSequence(entropy) generates first.
  static std::array<std::uint64_t, 4> seed_words(const std::vector<std::uint32_t>& entropy) {
    std::array<std::uint32_t, 4> pool{};
    std::uint32_t constant = 0x43b0d7e5;
    const auto hashed = [&](std::uint32_t value, std::uint32_t factor) {
      value ^= constant;
      constant *= factor;
      value *= constant;
      return value ^ value >> 16;
    };
    const auto mixed = [](std::uint32_t x, std::uint32_t y) {
      const std::uint32_t result = 0xca01f9ddu * x - 0x4973f715u * y;
      return result ^ result >> 16;
    };
    constexpr std::uint32_t in = 0x931e8875, out = 0x58f38ded;
    for (std::size_t at = 0; at < 4; ++at) pool[at] = hashed(at < entropy.size() ? entropy[at] : 0, in);
    for (std::size_t from = 0; from < 4; ++from)
      for (std::size_t to = 0; to < 4; ++to)
        if (from != to) pool[to] = mixed(pool[to], hashed(pool[from], in));
    std::array<std::uint64_t, 4> words{};
    constant = 0x8b51f9dd;
    for (std::size_t at = 0; at < 8; ++at)
      words[at / 2] |= std::uint64_t{hashed(pool[at % 4], out)} << (at % 2 * 32);
    return words;
  }

  Wide state_, step_;
};

// How to draw a token. temperature: 0 takes the likeliest token. top_k: only the k likeliest tokens are drawn
// from; 0 for all. top_p: only the likeliest tokens that together have this probability.
struct Sampler {
  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0;

  void verify() const {
    if (!(temperature >= 0 && temperature <= 1e6))
      throw Error(Fault::option, "temperature is " + std::to_string(temperature) +
                                     "; expected 0 (the likeliest token) or a positive number.");
    if (top_k < 0)
      throw Error(Fault::option,
                  "top_k is " + std::to_string(top_k) + "; expected at least 1, or 0 for all.");
    if (!(top_p > 0 && top_p <= 1))
      throw Error(Fault::option, "top_p is " + std::to_string(top_p) + "; expected above 0 and at most 1.");
  }

  // A token from logits [V]; throws where they have no finite maximum.
  std::int64_t operator()(View<float> logits, Random& random) const {
    const auto likeliest = std::max_element(logits.begin(), logits.end());
    const bool any_nan = std::any_of(logits.begin(), logits.end(), [](float x) { return std::isnan(x); });
    if (logits.empty() || any_nan || !std::isfinite(*likeliest))
      throw Error(Fault::artefact,
                  "the model's logits are not finite, so no token can be drawn; its weights "
                  "are damaged or diverged.");
    if (temperature == 0) return likeliest - logits.begin();
    const std::size_t size = logits.size();
    std::vector<double> weights(size);
    for (std::size_t token = 0; token < size; ++token) {
      const double scaled = (static_cast<double>(logits[token]) - *likeliest) / temperature;
      weights[token] = std::exp(scaled);
    }
    keep_top_k(logits, weights);
    keep_top_p(weights);
    std::partial_sum(weights.begin(), weights.end(), weights.begin());
    const double drawn = random.next() * weights.back();
    auto found = std::upper_bound(weights.begin(), weights.end(), drawn);
    if (found == weights.end())  // the product was rounded up to the whole: the last token with any weight
      found = std::lower_bound(weights.begin(), weights.end(), weights.back());
    return found - weights.begin();
  }

 private:
  // Of equals the smaller id is kept.
  void keep_top_k(View<float> logits, std::vector<double>& weights) const {
    const std::size_t size = weights.size();
    if (top_k == 0 || static_cast<std::size_t>(top_k) >= size) return;
    std::vector<std::size_t> order(size);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::nth_element(order.begin(), order.begin() + top_k, order.end(), [&](std::size_t a, std::size_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    for (auto at = order.begin() + top_k; at != order.end(); ++at) weights[*at] = 0;
  }

  // Drops what is outside of the smallest set of tokens that together have the share top_p.
  void keep_top_p(std::vector<double>& weights) const {
    if (top_p >= 1) return;
    std::vector<std::size_t> order(weights.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return weights[a] > weights[b]; });
    const double enough = top_p * std::accumulate(weights.begin(), weights.end(), 0.0);
    double sum = 0;
    for (const std::size_t token : order) {
      sum += weights[token];
      if (sum - weights[token] >= enough) weights[token] = 0;
    }
  }
};

}  // namespace xl_export

#endif
