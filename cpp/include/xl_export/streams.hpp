// Saved streams: files that the Python package and the ES module continue, and the other way round. They have
// the layout of safetensors: the length of a header, the header in JSON, and the numbers without a gap.
#ifndef XL_EXPORT_STREAMS_HPP
#define XL_EXPORT_STREAMS_HPP

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "session.hpp"

namespace xl_export {

namespace detail {

constexpr const char* stream_format = "xl-export stream 1";
constexpr std::size_t most_header_bytes = std::size_t{1} << 26;
constexpr std::int64_t furthest_position = std::int64_t{1} << 62;

inline const char* stored_type(ElementType type) {
  return type == ElementType::float16 ? "F16" : "F32";
}

// The header's entry of a tensor, after which the next one begins at `at`.
inline std::string header_entry(const std::string& name, const char* dtype,
                                const std::vector<std::int64_t>& shape, std::size_t& at,
                                std::size_t num_bytes) {
  std::string entry;
  json::append_string(entry, name);
  entry += std::string(": {\"dtype\": \"") + dtype + "\", \"shape\": [";
  for (std::size_t axis = 0; axis < shape.size(); ++axis)
    entry += (axis ? ", " : "") + std::to_string(shape[axis]);
  entry += "], \"data_offsets\": [" + std::to_string(at) + ", " + std::to_string(at + num_bytes) + "]}";
  at += num_bytes;
  return entry;
}

// A file of saved streams, as far as its own hash and layout say.
class StreamFile {
 public:
  explicit StreamFile(const Bytes& bytes) : bytes_(bytes) {
    if (as_text(bytes).substr(0, 4) == "PK\x03\x04")
      throw json::Value::wrong(
          "it is in the older form .npz; load it in Python and save it under another name");
    std::uint64_t length = 0;
    for (std::size_t byte = 8; byte-- > 0;) length = length << 8 | (byte < bytes.size() ? bytes[byte] : 0);
    if (bytes.size() < 8 || length > most_header_bytes || length > bytes.size() - 8)
      throw json::Value::wrong("it ends in its header");
    begin_ = 8 + static_cast<std::size_t>(length);
    header_ = json::parse(as_text(bytes).substr(8, static_cast<std::size_t>(length)));
    const json::Value& metadata = header_.at("__metadata__");
    if (metadata.at("format").string() != stream_format) throw json::Value::wrong("it holds no streams");
    if (metadata.at("sha256").string() != sha256(bytes.data() + begin_, bytes.size() - begin_))
      throw json::Value::wrong("its numbers are not those of its SHA-256");
    read_places();
  }

  const std::string& owner() const { return header_.at("__metadata__").at("owner").string(); }
  std::size_t tensors() const { return header_.keys.size() - 1; }

  std::vector<std::int64_t> shape(const std::string& name) const {
    std::vector<std::int64_t> sizes;
    for (const json::Value& size : header_.at(name).at("shape").list())
      sizes.push_back(size.integer(0, INT64_MAX));
    return sizes;
  }

  // The numbers of a tensor of this type and shape, `num_bytes` of them.
  const std::uint8_t* numbers(const std::string& name, const char* dtype,
                              const std::vector<std::int64_t>& wanted, std::size_t num_bytes) const {
    const auto& offsets = header_.at(name).at("data_offsets").list();
    const auto most = static_cast<std::int64_t>(bytes_.size() - begin_);
    const auto from = static_cast<std::size_t>(offsets[0].integer(0, most));
    if (header_.at(name).at("dtype").string() != dtype || shape(name) != wanted ||
        offsets[1].integer(0, most) - offsets[0].integer(0, most) != static_cast<std::int64_t>(num_bytes))
      throw json::Value::wrong("its tensor " + shown(name) +
                               " has another type or shape than the artefact's");
    return bytes_.data() + begin_ + from;
  }

 private:
  // Tensors must follow each other without a gap and without an overlap.
  void read_places() const {
    const auto most = static_cast<std::int64_t>(bytes_.size() - begin_);
    std::vector<std::pair<std::int64_t, std::int64_t>> places;
    for (const std::string& name : header_.keys) {
      if (name == "__metadata__") continue;
      const auto& offsets = header_.at(name).at("data_offsets").list();
      if (offsets.size() != 2) throw json::Value::wrong("a tensor has not two offsets");
      places.emplace_back(offsets[0].integer(0, most), offsets[1].integer(0, most));
    }
    std::sort(places.begin(), places.end());
    std::int64_t at = 0;
    for (const auto& [from, to] : places) {
      if (from != at || to < from) throw json::Value::wrong("its tensors overlap or leave a gap");
      at = to;
    }
    if (at != most) throw json::Value::wrong("its tensors overlap or leave a gap");
  }

  const Bytes& bytes_;
  json::Value header_;
  std::size_t begin_ = 0;
};

}  // namespace detail

// Writes all streams of a memory to a file, whole or not at all.
inline void save(const Memory& memory, const std::filesystem::path& path) {
  const std::size_t batch = memory.positions.size();
  if (batch != static_cast<std::size_t>(memory.batch()))
    throw Error(Fault::stream, "the memory has not one position for each stream; give one to each.");
  if (path.extension() == ".npz")
    throw Error(Fault::option, path.string() + " has the name of the older form; leave .npz out of it.");
  detail::Bytes numbers;
  const auto add = [&](const void* data, std::size_t num_bytes) {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    numbers.insert(numbers.end(), bytes, bytes + num_bytes);
  };
  std::size_t at = 0;
  std::string entries = detail::header_entry("positions", "I64", {memory.batch()}, at, 8 * batch);
  add(memory.positions.data(), 8 * batch);
  for (std::size_t index = 0; index < memory.state_.size(); ++index) {
    const State& state = memory.state_[index];
    const std::size_t row = state.row_bytes(), first = numbers.size();
    add(memory.now_[index].bytes.data(), row * batch);
    for (std::size_t number = 0; number < batch; ++number) {
      std::uint8_t* data = numbers.data() + first + number * row;
      if (detail::is_finite(data, row, state.dtype)) continue;
      if (memory.positions[number] > 0)
        throw Error(Fault::stream, "row " + std::to_string(number) +
                                       " of the memory holds values that are not "
                                       "finite; start a new text in it (position 0) before saving.");
      std::memset(data, 0, row);  // a row that starts again sees nothing of it
    }
    std::vector<std::int64_t> shape = state.sizes;
    shape.insert(shape.begin(), memory.batch());
    entries +=
        ", " + detail::header_entry(state.past, detail::stored_type(state.dtype), shape, at, row * batch);
  }
  std::string header = "{\"__metadata__\": {\"format\": \"" + std::string(detail::stream_format) +
                       "\", \"owner\": \"" + memory.owner() + "\", \"sha256\": \"" +
                       detail::sha256(numbers.data(), numbers.size()) + "\"}, " + entries + "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the numbers begin at a multiple of 8 bytes
  detail::Bytes file;
  for (int byte = 0; byte < 8; ++byte)
    file.push_back(static_cast<std::uint8_t>(std::uint64_t{header.size()} >> (8 * byte)));
  file.insert(file.end(), header.begin(), header.end());
  file.insert(file.end(), numbers.begin(), numbers.end());
  detail::write_file(path, file);
}

// The memory in a file of saved streams. Throws where the streams belong to another artefact, and where the
// file is damaged.
inline Memory load(const Session& session, const std::filesystem::path& path) {
  const Spec& spec = session.spec();
  const detail::Bytes bytes = detail::read_file(path);
  const auto wrong = [](const std::string& what) { return detail::json::Value::wrong(what); };
  try {
    const detail::StreamFile file(bytes);
    if (file.owner() != spec.identity)
      throw Error(Fault::stream, path.string() + " holds the memory of artefact " +
                                     detail::shown(file.owner().substr(0, 12)) + ", and this session runs " +
                                     spec.identity.substr(0, 12) +
                                     "; open the artefact that the stream was started on.");
    const std::vector<std::int64_t> streams = file.shape("positions");
    if (streams.size() != 1 || file.tensors() != 1 + spec.state.size())
      throw wrong("it has not the tensors of this artefact's streams");
    Memory memory = session.start(streams[0]);
    const std::size_t batch = memory.positions.size();
    std::memcpy(memory.positions.data(), file.numbers("positions", "I64", streams, 8 * batch), 8 * batch);
    for (const std::int64_t position : memory.positions)
      if (position > detail::furthest_position || position < -detail::furthest_position)
        throw wrong("a position is beyond 2^62");
    for (std::size_t index = 0; index < spec.state.size(); ++index) {
      const State& state = spec.state[index];
      const std::size_t num_bytes = batch * state.row_bytes();
      std::vector<std::int64_t> shape = state.sizes;
      shape.insert(shape.begin(), streams[0]);
      const std::uint8_t* data = file.numbers(state.past, detail::stored_type(state.dtype), shape, num_bytes);
      if (!detail::is_finite(data, num_bytes, state.dtype))
        throw wrong("it holds values that are not finite");
      std::copy_n(data, num_bytes, memory.now_[index].bytes.begin());
    }
    return memory;
  } catch (const Error& error) {
    if (error.fault() != Fault::artefact) throw;
    throw Error(Fault::artefact, path.string() + " is no stream that can be continued: " + error.what() +
                                     "; give a file that save or save_memory wrote.");
  }
}

}  // namespace xl_export

#endif
