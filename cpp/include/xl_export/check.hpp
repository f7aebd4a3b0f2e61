// The self-test of an artefact: it replays the reference, tokens and the right answers to them.
#ifndef XL_EXPORT_CHECK_HPP
#define XL_EXPORT_CHECK_HPP

#include <cstdint>

#include "session.hpp"

namespace xl_export {

// How far every log-probability is from the reference, in nats, and what is let pass. Of a step that is no
// language model: how far every output is, relative to itself or to `scale_of`, whichever is larger.
struct Report {
  double max_difference = 0, tolerance = 0, mean_difference = 0, mean_tolerance = 0;
  std::int64_t tokens = 0;
  // The mean of differences with a NaN is NaN, which is within no tolerance.
  bool passed() const { return max_difference <= tolerance && mean_difference <= mean_tolerance; }
};

// Replays the reference of the session's artefact.
Report check(const Session& session);

}  // namespace xl_export

#endif
