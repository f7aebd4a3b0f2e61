// Files: read whole, verified against their recorded hash, and written so that they are whole or absent.
#ifndef XL_EXPORT_FILE_HPP
#define XL_EXPORT_FILE_HPP

#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

#include "include/xl_export/spec.hpp"

namespace xl_export::detail {

using Bytes = std::vector<std::uint8_t>;

// Weights, memory and saved streams are little-endian, and are taken as they lie in their files.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "xl_export supports only little-endian machines");

inline std::string_view as_text(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The bytes of memory that this process may take, so that an absurd size becomes a sentence.
double machine_bytes();

// The content of a regular file. A pipe or a device is refused: it may never end.
Bytes read_file(const std::filesystem::path& path, std::uint64_t most = UINT64_MAX);

// The content of a file that is the one that spec.json lists; throws where it is another. It is read once, so
// what is returned is what was verified, whatever happens to the file afterwards.
Bytes read_verified(const std::filesystem::path& path, const FileFacts& facts);

// Writes a file, whole or not at all: a full disk or a crash leaves what was there before.
void write_file(const std::filesystem::path& path, const Bytes& bytes);

}  // namespace xl_export::detail

#endif
