// Arrays in NumPy's format (.npy) in a zip archive whose members are stored and not compressed (.npz), as
// `save_memory` of the Python package writes them. Nothing is allocated before its size is known to be there.
#ifndef XL_EXPORT_NPZ_HPP
#define XL_EXPORT_NPZ_HPP

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "file.hpp"

namespace xl_export::detail::npz {

// An array in C order and little-endian. dtype: as NumPy writes it, such as "<f4".
struct Array {
  std::string dtype;
  std::vector<std::int64_t> shape;
  Bytes data;

  std::size_t count() const {
    std::size_t product = 1;
    for (const std::int64_t size : shape) product *= static_cast<std::size_t>(size);
    return product;
  }
};

inline Error damaged(const char* what) { return Error(Fault::artefact, what); }

inline std::uint32_t crc32(const std::uint8_t* data, std::size_t size) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> made{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      made[byte] = byte;
      for (int bit = 0; bit < 8; ++bit) made[byte] = made[byte] >> 1 ^ (made[byte] & 1 ? 0xedb88320u : 0);
    }
    return made;
  }();
  std::uint32_t sum = 0xffffffff;
  for (std::size_t at = 0; at < size; ++at) sum = table[(sum ^ data[at]) & 0xff] ^ sum >> 8;
  return ~sum;
}

// Little-endian numbers of an archive, each read only where it is inside.
class Reader {
 public:
  explicit Reader(const Bytes& bytes) : bytes_(bytes) {}

  std::size_t size() const { return bytes_.size(); }
  const std::uint8_t* inside(std::uint64_t at, std::uint64_t length) const {
    if (at > bytes_.size() || length > bytes_.size() - at) throw damaged("it ends too early");
    return bytes_.data() + at;
  }
  std::uint64_t number(std::uint64_t at, int width) const {
    const std::uint8_t* bytes = inside(at, static_cast<std::uint64_t>(width));
    std::uint64_t value = 0;
    for (int index = width; index-- > 0;) value = value << 8 | bytes[index];
    return value;
  }

 private:
  const Bytes& bytes_;
};

inline std::string_view after(std::string_view text, std::string_view mark) {
  const std::size_t found = text.find(mark);
  if (found == std::string_view::npos) throw damaged("an array has no header of NumPy's");
  return text.substr(found + mark.size());
}

// The array in the content of a .npy file. Its header is a dictionary as Python prints it.
inline Array parse_npy(std::string_view content) {
  if (content.size() < 12 || content.substr(0, 6) != "\x93NUMPY") throw damaged("a member is no array of NumPy's");
  const bool first = content[6] == 1;
  const auto byte = [&](std::size_t at) { return std::size_t{static_cast<unsigned char>(content[at])}; };
  const std::size_t begin = first ? 10 : 12;
  const std::size_t length =
      byte(8) | byte(9) << 8 | (first ? 0 : byte(10) << 16 | byte(11) << 24);
  if (length > content.size() - begin) throw damaged("an array ends in its header");
  const std::string_view header = content.substr(begin, length);
  Array array;
  const std::string_view dtype = after(header, "'descr': '");
  array.dtype = std::string(dtype.substr(0, dtype.find('\'')));
  if (after(header, "'fortran_order': ").substr(0, 5) != "False") throw damaged("an array is in Fortran's order");
  std::string_view shape = after(header, "'shape': (");
  const std::size_t end = shape.find(')');
  if (end == std::string_view::npos) throw damaged("an array has no shape");
  shape = shape.substr(0, end);
  double elements = 1;
  std::int64_t size = -1;
  for (std::size_t at = 0; at <= shape.size(); ++at) {
    const char letter = at < shape.size() ? shape[at] : ',';
    if (letter >= '0' && letter <= '9') {
      size = 10 * std::max<std::int64_t>(size, 0) + (letter - '0');
      if (size > std::int64_t{1} << 40) throw damaged("an array has an absurd size");
    } else if (letter == ',') {
      if (size >= 0) array.shape.push_back(size), elements *= static_cast<double>(size);
      size = -1;
    } else if (letter != ' ') {
      throw damaged("an array has no shape");
    }
  }
  if (elements > static_cast<double>(content.size())) throw damaged("an array is larger than its file");
  const std::string_view data = content.substr(begin + length);
  array.data.assign(data.begin(), data.end());
  return array;
}

// The arrays of an archive by name.
inline std::map<std::string, Array> parse(const Bytes& archive) {
  const Reader reader(archive);
  constexpr std::uint64_t end_size = 22, longest_comment = 65535;
  if (reader.size() < end_size) throw damaged("it is no archive");
  std::uint64_t end = reader.size() - end_size;
  const std::uint64_t first = end > longest_comment ? end - longest_comment : 0;
  while (reader.number(end, 4) != 0x06054b50) {
    if (end == first) throw damaged("it is no archive");
    --end;
  }
  const std::uint64_t count = reader.number(end + 10, 2);
  std::uint64_t at = reader.number(end + 16, 4);
  std::map<std::string, Array> arrays;
  for (std::uint64_t index = 0; index < count; ++index) {
    if (reader.number(at, 4) != 0x02014b50) throw damaged("its directory is damaged");
    const std::uint64_t method = reader.number(at + 10, 2), sum = reader.number(at + 16, 4);
    const std::uint64_t size = reader.number(at + 24, 4), name_length = reader.number(at + 28, 2);
    const std::uint64_t local = reader.number(at + 42, 4);
    std::string name(reinterpret_cast<const char*>(reader.inside(at + 46, name_length)), name_length);
    at += 46 + name_length + reader.number(at + 30, 2) + reader.number(at + 32, 2);
    if (method != 0) throw damaged("its arrays are compressed, and save_memory does not compress");
    if (size == 0xffffffff || local == 0xffffffff) throw damaged("an array has 4 GB or more");
    if (reader.number(local, 4) != 0x04034b50) throw damaged("a member is damaged");
    const std::uint64_t begin = local + 30 + reader.number(local + 26, 2) + reader.number(local + 28, 2);
    const std::uint8_t* content = reader.inside(begin, size);
    if (crc32(content, size) != sum) throw damaged("the checksum of an array does not match");
    if (name.size() > 4 && name.compare(name.size() - 4, 4, ".npy") == 0) name.resize(name.size() - 4);
    Array array = parse_npy({reinterpret_cast<const char*>(content), size});
    if (!arrays.emplace(name, std::move(array)).second) throw damaged("it has two arrays of one name");
  }
  return arrays;
}

// Writes an archive; the arrays are in the order of their names.
class Writer {
 public:
  void add(const std::string& name, const std::string& dtype, const std::vector<std::int64_t>& shape,
           const void* data, std::size_t size) {
    std::string header = "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': (";
    for (const std::int64_t axis : shape) header += std::to_string(axis) + ",";
    header += "), }";
    header.append(63 - (10 + header.size()) % 64, ' ');  // the data begins at a multiple of 64
    header += '\n';
    Bytes content = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0};
    append(content, header.size(), 2);
    content.insert(content.end(), header.begin(), header.end());
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    content.insert(content.end(), bytes, bytes + size);
    const std::string member = name + ".npy";
    const std::uint64_t local = archive_.size();
    if (local + content.size() > 0xf0000000)
      throw Error(Fault::stream, "the streams have 4 GB or more, which this program does not save; save fewer "
                                 "streams in one file.");
    append(archive_, 0x04034b50, 4);
    describe(archive_, content, member);
    append_text(archive_, member);
    archive_.insert(archive_.end(), content.begin(), content.end());
    append(directory_, 0x02014b50, 4);
    append(directory_, 20, 2);  // written by a program of this version
    describe(directory_, content, member);
    for (const int width : {2, 2, 2, 4}) append(directory_, 0, width);  // comment, disk, attributes
    append(directory_, local, 4);
    append_text(directory_, member);
    ++count_;
  }

  Bytes finish() && {
    const std::uint64_t at = archive_.size();
    archive_.insert(archive_.end(), directory_.begin(), directory_.end());
    append(archive_, 0x06054b50, 4);
    append(archive_, 0, 4);  // disks
    append(archive_, count_, 2), append(archive_, count_, 2);
    append(archive_, directory_.size(), 4), append(archive_, at, 4), append(archive_, 0, 2);
    return std::move(archive_);
  }

 private:
  static void append(Bytes& bytes, std::uint64_t value, int width) {
    for (int index = 0; index < width; ++index) bytes.push_back(static_cast<std::uint8_t>(value >> (8 * index)));
  }
  static void append_text(Bytes& bytes, const std::string& text) {
    bytes.insert(bytes.end(), text.begin(), text.end());
  }
  // What both headers of a member have in common.
  static void describe(Bytes& bytes, const Bytes& content, const std::string& member) {
    append(bytes, 20, 2), append(bytes, 0, 2), append(bytes, 0, 2);  // version, flags, stored
    append(bytes, 0, 2), append(bytes, 0x21, 2);                     // 1 January 1980, the first day of zip
    append(bytes, crc32(content.data(), content.size()), 4);
    append(bytes, content.size(), 4), append(bytes, content.size(), 4);
    append(bytes, member.size(), 2), append(bytes, 0, 2);
  }

  Bytes archive_, directory_;
  std::uint64_t count_ = 0;
};

}  // namespace xl_export::detail::npz

#endif
