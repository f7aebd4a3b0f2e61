// SHA-256 (FIPS 180-4), by which the files of an artefact and its identity are verified.
#ifndef XL_EXPORT_SHA256_HPP
#define XL_EXPORT_SHA256_HPP

#include <cstddef>
#include <string>

namespace xl_export::detail {

// The hash of some bytes, in hexadecimal.
std::string sha256(const void* data, std::size_t size);

}  // namespace xl_export::detail

#endif
