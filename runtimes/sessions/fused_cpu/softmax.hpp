// Log-probabilities of given tokens, for sessions that score.
#pragma once

#include <cmath>

#include "head.hpp"

namespace xl {

/// log of the sum of exponentials of x [count]; NaN if one of them is NaN or plus infinity.
inline float log_sum_exp(const float* x, int64_t count) {
  constexpr int64_t TOGETHER = 64 * LANES;  // so few floats are added up that no digit is lost
  vec highest = all(-INFINITY);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) highest = larger(load(x + i), highest);
  float top = largest(highest);
  for (; i < count; ++i) top = std::max(top, x[i]);
  double sum_of_all = 0;
  for (int64_t from = 0; from < count; from += TOGETHER) {
    const int64_t end = std::min(from + TOGETHER, count);
    vec total{};
    for (i = from; i + LANES <= end; i += LANES) total += exp2_of((load(x + i) - top) * LOG2E);
    sum_of_all += sum(total);
    for (; i < end; ++i) sum_of_all += std::exp(x[i] - top);
  }
  return top + static_cast<float>(std::log(sum_of_all));
}

/// log p(target) of each row of logits [rows, size]; 0 for a target below 0.
inline void log_probabilities(const float* logits, int64_t rows, int64_t size, const int64_t* targets, float* out) {
  for (int64_t r = 0; r < rows; ++r, logits += size)
    out[r] = targets[r] < 0 ? 0 : logits[targets[r]] - log_sum_exp(logits, size);
}

}  // namespace xl
