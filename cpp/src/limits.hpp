// The largest sizes that are accepted, and what happens where memory runs out.
#ifndef XL_EXPORT_LIMITS_HPP
#define XL_EXPORT_LIMITS_HPP

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#include "include/xl_export/error.hpp"

namespace xl_export::detail {

// The largest position, and the largest size of any one dimension.
constexpr std::int64_t furthest_position = std::int64_t{1} << 62, max_size = 1 << 24;

// Runs what may need more memory than there is, which becomes an Error too. what: the subject of its
// sentence.
template <class Work>
auto in_memory(const char* what, Work work) {
  const auto refused = [&] {
    return Error(Fault::option, std::string(what) +
                                    " needs more memory than this machine has; use a smaller batch, fewer "
                                    "tokens at once, or a larger machine.");
  };
  try {
    return work();
  } catch (const std::bad_alloc&) {
    throw refused();
  } catch (const std::length_error&) {  // of a vector that no machine could hold
    throw refused();
  }
}

}  // namespace xl_export::detail

#endif
