// Files: read whole, verified against their recorded hash, and written so that they are whole or absent.
#ifndef XL_EXPORT_FILE_HPP
#define XL_EXPORT_FILE_HPP

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "error.hpp"
#include "sha256.hpp"

namespace xl_export::detail {

using Bytes = std::vector<std::uint8_t>;

inline std::string_view as_text(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// The size of a regular file; throws where there is none. A pipe or a device is refused: it may never end.
inline std::uint64_t size_of_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error(Fault::artefact, path.string() + " is missing; copy the whole folder, or export it again.");
  const std::uint64_t size = std::filesystem::file_size(path, error);
  if (error) throw Error(Fault::artefact, path.string() + " cannot be read; copy it again.");
  return size;
}

inline Bytes read_file(const std::filesystem::path& path, std::uint64_t most = UINT64_MAX) {
  const std::uint64_t size = size_of_file(path);
  if (size > most)
    throw Error(Fault::artefact, path.string() + " has " + std::to_string(size) +
                                     " bytes, expected at most " + std::to_string(most) +
                                     "; copy or make it again.");
  Bytes bytes(static_cast<std::size_t>(size));
  std::ifstream stream(path, std::ios::binary);
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!stream || static_cast<std::uint64_t>(stream.gcount()) != size)
    throw Error(Fault::artefact, path.string() + " could not be read to its end; copy it again.");
  return bytes;
}

// Hash and size of a file, as spec.json records them.
struct FileFacts {
  std::string sha256;
  std::uint64_t num_bytes = 0;
};

// The content of a file that is the one that spec.json lists; throws where it is another. It is read once, so
// what is returned is what was verified, whatever happens to the file afterwards.
inline Bytes read_verified(const std::filesystem::path& path, const FileFacts& facts) {
  const std::uint64_t size = size_of_file(path);
  if (size != facts.num_bytes)
    throw Error(Fault::artefact, path.string() + " has " + std::to_string(size) + " bytes, expected " +
                                     std::to_string(facts.num_bytes) +
                                     "; copy it again, or export it again.");
  Bytes bytes = read_file(path);
  if (sha256(bytes.data(), bytes.size()) != facts.sha256)
    throw Error(Fault::artefact, path.string() +
                                     " was altered: its SHA-256 is not the one in spec.json; copy "
                                     "it again, or export it again.");
  return bytes;
}

// Writes a file under another name first, so that a full disk or a crash leaves no half of it.
inline void write_file(const std::filesystem::path& path, const Bytes& bytes) {
  const auto failed = [&] {
    return Error(Fault::option,
                 path.string() + " could not be written; name a folder that exists and has room.");
  };
  std::filesystem::path temporary = path;
  temporary += ".partial";
  {
    std::ofstream stream(temporary, std::ios::binary | std::ios::trunc);
    stream.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    stream.flush();
    if (!stream) {
      std::error_code ignored;
      stream.close();
      std::filesystem::remove(temporary, ignored);
      throw failed();
    }
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw failed();
  }
}

}  // namespace xl_export::detail

#endif
