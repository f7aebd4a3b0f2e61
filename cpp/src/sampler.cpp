#include "include/xl_export/sampler.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>

#include "sampling.hpp"

namespace xl_export {
namespace {

// The 64-bit words that SeedSequence(entropy) generates first.
std::array<std::uint64_t, 4> seed_words(const std::vector<std::uint32_t>& entropy) {
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

void drop_below(double least, std::vector<double>& weights) {
  for (double& weight : weights)
    if (weight < least) weight = 0;
}

}  // namespace

Random::Random(std::uint64_t seed, std::uint64_t row) {
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

double Random::next() {
  advance();
  const std::uint64_t mixed = state_.high ^ state_.low;
  const unsigned turn = static_cast<unsigned>(state_.high >> 58);
  const std::uint64_t bits = mixed >> turn | mixed << ((64 - turn) & 63);
  return static_cast<double>(bits >> 11) * (1.0 / 9007199254740992.0);
}

Random::Wide Random::sum(Wide a, Wide b) {
  const std::uint64_t low = a.low + b.low;
  return {a.high + b.high + (low < a.low), low};
}

Random::Wide Random::product(std::uint64_t a, std::uint64_t b) {
  const std::uint64_t mask = 0xffffffff, al = a & mask, ah = a >> 32, bl = b & mask, bh = b >> 32;
  const std::uint64_t low = al * bl, middle = ah * bl + (low >> 32), other = al * bh + (middle & mask);
  return {ah * bh + (middle >> 32) + (other >> 32), a * b};
}

void Random::advance() {
  constexpr Wide factor = {0x2360ed051fc65da4, 0x4385df649fccf645};
  Wide next = product(state_.low, factor.low);
  next.high += state_.high * factor.low + state_.low * factor.high;
  state_ = sum(next, step_);
}

void Sampler::verify() const {
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

std::int64_t Sampler::operator()(View<float> logits, const History& history, double uniform,
                                 Scratch& scratch) const {
  std::vector<double>&scores = scratch.scores, &weights = scratch.weights, &sorted = scratch.sorted;
  scores.assign(logits.begin(), logits.end());
  if (repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0) penalise(scores, history);
  const auto likeliest = std::max_element(scores.begin(), scores.end());
  const bool any_nan = std::any_of(scores.begin(), scores.end(), [](double x) { return std::isnan(x); });
  if (scores.empty() || any_nan || !std::isfinite(*likeliest))
    throw Error(Fault::artefact,
                "the model's logits are not finite, so no token can be drawn; its weights are damaged or "
                "diverged.");
  if (temperature == 0) return likeliest - scores.begin();
  const std::size_t size = scores.size(), k = static_cast<std::size_t>(top_k);
  weights.resize(size);
  for (std::size_t token = 0; token < size; ++token)
    weights[token] = std::exp((scores[token] - *likeliest) / temperature);
  if (k > 0 && k < size) {
    sorted = scores;
    const auto least = sorted.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(sorted.begin(), least, sorted.end(), std::greater<>());
    for (std::size_t token = 0; token < size; ++token)
      if (scores[token] < *least) weights[token] = 0;
  }
  drop_below(min_p, weights);  // the largest weight is 1
  if (top_p < 1) {
    sorted = weights;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const double wanted = top_p * std::accumulate(sorted.begin(), sorted.end(), 0.0);
    auto last = sorted.begin();
    for (double sum = *last; sum < wanted; sum += *last) ++last;
    drop_below(*last, weights);
  }
  std::partial_sum(weights.begin(), weights.end(), weights.begin());
  return std::upper_bound(weights.begin(), weights.end(), uniform * weights.back()) - weights.begin();
}

void Sampler::penalise(std::vector<double>& scores, const History& history) const {
  for (std::size_t token = 0; token < scores.size(); ++token) {
    const std::int64_t count = history.counts_[token];
    if (count == History::absent) continue;
    double& score = scores[token];
    score = score > 0 ? score / repetition_penalty : score * repetition_penalty;
    if (count > 0) score -= presence_penalty + frequency_penalty * static_cast<double>(count);
  }
}

}  // namespace xl_export
