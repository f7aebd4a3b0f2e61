// Draws the next token from logits. The random numbers are those of NumPy's default_rng([seed, row]), so the
// same seed draws the same tokens as the Python package from the same logits.
#ifndef XL_EXPORT_SAMPLER_HPP
#define XL_EXPORT_SAMPLER_HPP

#include <cstddef>
#include <cstdint>
#include <vector>

#include "error.hpp"

namespace xl_export {

// NumPy's generator PCG64 (O'Neill 2014, XSL-RR 128/64), seeded by NumPy's SeedSequence of [seed, row].
class Random {
 public:
  explicit Random(std::uint64_t seed, std::uint64_t row = 0);

  // A number from 0 to 1, 1 excluded, of 53 random bits.
  double next();

 private:
  struct Wide {
    std::uint64_t high = 0, low = 0;
  };

  static Wide sum(Wide a, Wide b);
  static Wide product(std::uint64_t a, std::uint64_t b);
  void advance();

  Wide state_, step_;
};

// The tokens of a text so far, for penalties.
class History {
 public:
  explicit History(std::int64_t vocabulary) : counts_(static_cast<std::size_t>(vocabulary), absent) {}

  void add_prompt(std::int64_t token) {
    std::int64_t& count = counts_[static_cast<std::size_t>(token)];
    if (count == absent) count = 0;
  }
  void add_generated(std::int64_t token) {
    add_prompt(token);
    ++counts_[static_cast<std::size_t>(token)];
  }

 private:
  friend struct Sampler;
  static constexpr std::int64_t absent = -1;
  std::vector<std::int64_t> counts_;  // how often each token was generated; 0 if it is only in the prompt
};

// How to draw a token (docs/reference/step.md, "Sampling"). top_k: 0 for all tokens.
struct Sampler {
  // Memory that drawing needs. Drawing with the same one again allocates nothing.
  struct Scratch {
    std::vector<double> scores, weights, sorted;
  };

  double temperature = 1.0;
  std::int64_t top_k = 0;
  double top_p = 1.0, min_p = 0.0;
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;

  // Throws unless every setting is in its range.
  void verify() const;

  // A token from logits [V] and a random number of [0, 1); throws if the logits have no finite maximum.
  std::int64_t operator()(View<float> logits, const History& history, double uniform, Scratch& scratch) const;

 private:
  void penalise(std::vector<double>& scores, const History& history) const;
};

}  // namespace xl_export

#endif
