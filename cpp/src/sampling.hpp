// The settings of a sampler by name.
#ifndef XL_EXPORT_SAMPLING_HPP
#define XL_EXPORT_SAMPLING_HPP

#include <cstdint>
#include <limits>

#include "include/xl_export/sampler.hpp"

namespace xl_export::detail {

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

}  // namespace xl_export::detail

#endif
