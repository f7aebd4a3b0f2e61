// Reads spec.json.
#ifndef XL_EXPORT_SPEC_FILE_HPP
#define XL_EXPORT_SPEC_FILE_HPP

#include <filesystem>
#include <optional>
#include <string>

#include "include/xl_export/error.hpp"
#include "include/xl_export/spec.hpp"

namespace xl_export::detail {

constexpr std::uint64_t max_spec_bytes = 1 << 24;

// Runs what reads a JSON file, and makes the half sentences of its errors whole.
template <class Read>
auto naming(const std::filesystem::path& path, Read read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error(Fault::artefact, path.string() + " is damaged or of another version: " + error.what() +
                                     "; export the artefact again.");
  }
}

// The spec of an artefact folder, its digest verified; the files that it lists are not. public_key: the PEM
// file of the key that must have signed it.
Spec read_spec(const std::filesystem::path& folder, const std::optional<std::string>& public_key = {});

}  // namespace xl_export::detail

#endif
