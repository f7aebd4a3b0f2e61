#include "file.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <random>
#include <string>
#include <system_error>

#include "include/xl_export/error.hpp"
#include "sha256.hpp"

namespace xl_export::detail {

double machine_bytes() {
  const long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGE_SIZE);
  double bytes = pages > 0 && size > 0 ? static_cast<double>(pages) * static_cast<double>(size) : 1e15;
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, static_cast<double>(limit.rlim_cur));
  return bytes;
}

namespace {

// The size of a regular file; throws where there is none. A pipe or a device is refused: it may never end.
std::uint64_t size_of_file(const std::filesystem::path& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error(Fault::artefact, path.string() + " is missing; copy the whole folder, or export it again.");
  const std::uint64_t size = std::filesystem::file_size(path, error);
  if (error) throw Error(Fault::artefact, path.string() + " cannot be read; copy it again.");
  return size;
}

}  // namespace

Bytes read_file(const std::filesystem::path& path, std::uint64_t most) {
  const std::uint64_t size = size_of_file(path);
  if (size > most)
    throw Error(Fault::artefact, path.string() + " has " + std::to_string(size) +
                                     " bytes, expected at most " + std::to_string(most) +
                                     "; copy or make it again.");
  if (static_cast<double>(size) > machine_bytes())  // a file may be larger than the disk that holds it
    throw Error(Fault::artefact,
                path.string() + " is larger than the memory of this machine; copy it again.");
  Bytes bytes(static_cast<std::size_t>(size));
  std::ifstream stream(path, std::ios::binary);
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!stream || static_cast<std::uint64_t>(stream.gcount()) != size)
    throw Error(Fault::artefact, path.string() + " could not be read to its end; copy it again.");
  return bytes;
}

Bytes read_verified(const std::filesystem::path& path, const FileFacts& facts) {
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

namespace {

// A new file with a unique name, next to the file that it will become.
class PartialFile {
 public:
  explicit PartialFile(const std::filesystem::path& path) {
    std::random_device random;
    for (int attempt = 0; attempt < 16 && descriptor_ < 0; ++attempt) {
      char suffix[32];
      std::snprintf(suffix, sizeof suffix, ".%08x.partial", static_cast<unsigned>(random()));
      path_ = path.parent_path() / ("." + path.filename().string() + suffix);
      // Never a file or a link that is there already: another writer's, or one that was planted.
      descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ < 0 && errno != EEXIST) break;
    }
    there_ = descriptor_ >= 0;
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;
  ~PartialFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (there_) ::unlink(path_.c_str());
  }

  // Whether all bytes are on the disk under the final name, which replaces what was there.
  bool become(const std::filesystem::path& path, const Bytes& bytes) {
    if (!there_) return false;
    for (std::size_t at = 0; at < bytes.size();) {
      const ssize_t count = ::write(descriptor_, bytes.data() + at, bytes.size() - at);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      at += static_cast<std::size_t>(count);
    }
    if (::fsync(descriptor_) != 0) return false;
    const int closed = ::close(descriptor_);
    descriptor_ = -1;
    if (closed != 0 || ::rename(path_.c_str(), path.c_str()) != 0) return false;
    there_ = false;
    return true;
  }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  bool there_ = false;
};

}  // namespace

void write_file(const std::filesystem::path& path, const Bytes& bytes) {
  if (!PartialFile(path).become(path, bytes))
    throw Error(Fault::option,
                path.string() + " could not be written; name a file in a folder that exists and has room.");
}

}  // namespace xl_export::detail
