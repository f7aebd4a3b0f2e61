// Draws the next token from logits. The random numbers are those of NumPy's default_rng([seed, row]), so the
// same seed draws the same tokens as the Python package from the same logits.
#ifndef XL_EXPORT_SAMPLER_HPP
#define XL_EXPORT_SAMPLER_HPP

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <string>
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

// The tokens of a request, for penalties: how often each was generated; 0 if it is only in the prompt.
using History = std::map<std::int64_t, std::int64_t>;

// How to draw a token (docs/reference/step.md, "Sampling"). top_k: 0 for all tokens.
struct Sampler {
  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0, min_p = 0.0;
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;

  // Throws unless every setting is in its range.
  void verify() const;

  // A token from logits [V] and a random number of [0, 1); throws if the logits have no finite maximum.
  std::int64_t operator()(View<float> logits, const History& history, double uniform) const {
    std::vector<double> scores(logits.begin(), logits.end());
    if (repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0) penalise(scores, history);
    const auto likeliest = std::max_element(scores.begin(), scores.end());
    const bool any_nan = std::any_of(scores.begin(), scores.end(), [](double x) { return std::isnan(x); });
    if (scores.empty() || any_nan || !std::isfinite(*likeliest))
      throw Error(Fault::artefact,
                  "the model's logits are not finite, so no token can be drawn; its weights "
                  "are damaged or diverged.");
    if (temperature == 0) return likeliest - scores.begin();
    const std::size_t size = scores.size(), k = static_cast<std::size_t>(top_k);
    std::vector<double> weights(size), sorted;
    for (std::size_t token = 0; token < size; ++token)
      weights[token] = std::exp((scores[token] - *likeliest) / temperature);
    if (k > 0 && k < size) {
      sorted = scores;
      std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<>());
      for (std::size_t token = 0; token < size; ++token)
        if (scores[token] < sorted[k - 1]) weights[token] = 0;
    }
    drop_below(min_p, weights);  // the largest weight is 1
    if (top_p < 1) {
      sorted = weights;
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      std::vector<double> sums(size);
      std::partial_sum(sorted.begin(), sorted.end(), sums.begin());
      const auto last = std::lower_bound(sums.begin(), sums.end(), top_p * sums.back());
      drop_below(sorted[last - sums.begin()], weights);
    }
    std::partial_sum(weights.begin(), weights.end(), weights.begin());
    return std::upper_bound(weights.begin(), weights.end(), uniform * weights.back()) - weights.begin();
  }

 private:
  void penalise(std::vector<double>& scores, const History& history) const {
    for (const auto& [token, count] : history) {
      double& score = scores[static_cast<std::size_t>(token)];
      score = score > 0 ? score / repetition_penalty : score * repetition_penalty;
      if (count > 0) score -= presence_penalty + frequency_penalty * static_cast<double>(count);
    }
  }

  static void drop_below(double least, std::vector<double>& weights) {
    for (double& weight : weights)
      if (weight < least) weight = 0;
  }
};

namespace detail {

// A setting by its name in sampling.json, and its range. `top_k`, the only integer, is not among them.
struct Setting {
  const char* name;
  double Sampler::*value;
  double least, most;
  const char* expected;
};

inline constexpr Setting settings[] = {
    {"temperature", &Sampler::temperature, 0, 1e6, "0 to 1,000,000"},
    {"top_p", &Sampler::top_p, std::numeric_limits<double>::denorm_min(), 1, "above 0 and at most 1"},
    {"min_p", &Sampler::min_p, 0, 1, "0 to 1"},
    {"repetition_penalty", &Sampler::repetition_penalty, 0.01, 100, "0.01 to 100"},
    {"presence_penalty", &Sampler::presence_penalty, -2, 2, "-2 to 2"},
    {"frequency_penalty", &Sampler::frequency_penalty, -2, 2, "-2 to 2"},
};

// The largest whole number that every language reads exactly.
inline constexpr std::int64_t most_top_k = (std::int64_t{1} << 53) - 1;

}  // namespace detail

inline void Sampler::verify() const {
  const auto require = [](const char* name, double value, bool inside, const char* expected) {
    char text[40];
    std::snprintf(text, sizeof text, "%g", value);
    const std::string sentence = std::string(name) + " is " + text + "; expected " + expected + ".";
    if (!inside) throw Error(Fault::option, sentence);
  };
  for (const detail::Setting& setting : detail::settings) {
    const double value = this->*setting.value;
    require(setting.name, value, value >= setting.least && value <= setting.most, setting.expected);
  }
  require("top_k", static_cast<double>(top_k), top_k >= 0 && top_k <= detail::most_top_k,
          "1 to 9,007,199,254,740,991, or 0 for all");
}

}  // namespace xl_export

#endif
