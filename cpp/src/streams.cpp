#include "include/xl_export/streams.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "conversion.hpp"
#include "file.hpp"
#include "json.hpp"
#include "memory_parts.hpp"
#include "sha256.hpp"
#include "utf8.hpp"

namespace xl_export {
namespace detail {
namespace {

constexpr const char* stream_format = "xl-export stream 1";
constexpr std::size_t most_header_bytes = std::size_t{1} << 26;
constexpr std::size_t most_header_values = std::size_t{1} << 18;  // of at least 16 thousand tensors

// Whether finite floats are scales of bytes: not negative, and small enough for their bytes to be finite.
bool are_scales(const std::uint8_t* data, std::size_t num_bytes) {
  constexpr float most = std::numeric_limits<float>::max() / 128;
  float scale;
  for (std::size_t at = 0; at + sizeof scale <= num_bytes; at += sizeof scale) {
    std::memcpy(&scale, data + at, sizeof scale);
    if (!(scale >= 0 && scale <= most)) return false;
  }
  return true;
}

// The header's entry of a tensor, after which the next one begins at `at`.
std::string header_entry(const std::string& name, const char* dtype, const std::vector<std::int64_t>& shape,
                         std::size_t& at, std::size_t num_bytes) {
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
    std::uint64_t length = 0;
    for (std::size_t byte = 8; byte-- > 0;) length = length << 8 | (byte < bytes.size() ? bytes[byte] : 0);
    if (bytes.size() < 8 || length > most_header_bytes || length > bytes.size() - 8)
      throw json::Value::wrong("it ends in its header");
    begin_ = 8 + static_cast<std::size_t>(length);
    const json::Value header =
        json::parse(as_text(bytes).substr(8, static_cast<std::size_t>(length)), most_header_values);
    const json::Value& metadata = header.at("__metadata__");
    if (metadata.at("format").string() != stream_format) throw json::Value::wrong("it holds no streams");
    if (metadata.at("sha256").string() != sha256(bytes.data() + begin_, bytes.size() - begin_))
      throw json::Value::wrong("its numbers do not match its SHA-256");
    identity_ = {metadata.at("layout").string(), metadata.at("weights").string()};
    if (const json::Value* adopted = metadata.find("adopted")) adopted_ = adopted->string();
    for (std::size_t index = 0; index < header.keys.size(); ++index)
      if (header.keys[index] != "__metadata__") add(header.keys[index], header.items[index]);
    verify_places();
  }

  const MemoryIdentity& identity() const { return identity_; }
  std::size_t tensors() const { return tensors_.size(); }
  const std::vector<std::int64_t>& shape(const std::string& name) const { return tensor(name).shape; }

  // The numbers of a tensor of this type and shape, `num_bytes` of them.
  const std::uint8_t* numbers(const std::string& name, const char* dtype,
                              const std::vector<std::int64_t>& wanted, std::size_t num_bytes) const {
    const Tensor& found = tensor(name);
    if (found.dtype != dtype || found.shape != wanted ||
        found.to - found.from != static_cast<std::int64_t>(num_bytes))
      throw json::Value::wrong("its tensor " + shown(name) +
                               " has another type or shape than the artefact's");
    return bytes_.data() + begin_ + static_cast<std::size_t>(found.from);
  }

  // A memory tensor of a session, in any element type, and its scales if it has bytes.
  StoredTensor memory(const State& state, std::int64_t batch) const {
    const std::string& dtype = tensor(state.name).dtype;
    StoredTensor found;
    for (const ElementFacts& facts : element_types)
      if (dtype == facts.stored) found.type = facts.type;
    const ElementFacts& facts = facts_of(found.type);
    std::vector<std::int64_t> shape = state.sizes;
    shape.insert(shape.begin(), batch);
    const std::size_t count = number_of(shape);
    found.numbers = numbers(state.name, facts.stored, shape, count * facts.num_bytes);
    if (!is_finite(found.numbers, count * facts.num_bytes, found.type))
      throw json::Value::wrong("it holds values that are not finite");
    if (!facts.scaled) return found;
    shape.back() = 1;
    const std::size_t num_bytes = number_of(shape) * sizeof(float);
    found.scales = numbers(state.name + "_scale", facts_of(ElementType::float32).stored, shape, num_bytes);
    if (!is_finite(found.scales, num_bytes, ElementType::float32))
      throw json::Value::wrong("it holds values that are not finite");
    if (!are_scales(found.scales, num_bytes))
      throw json::Value::wrong("it holds scales that no key or value has");
    return found;
  }

  // The hashes of earlier weights of each row.
  std::vector<std::string> adopted(std::size_t batch) const {
    std::vector<std::string> rows(1);
    for (const char letter : adopted_) {
      if (letter == ',')
        rows.emplace_back();
      else if (letter == ' ' || (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'f'))
        rows.back() += letter;
      else
        throw json::Value::wrong("`adopted` does not have hashes");
    }
    if (adopted_.empty()) rows.resize(batch);
    if (rows.size() != batch) throw json::Value::wrong("`adopted` does not have the hashes of its streams");
    return rows;
  }

 private:
  struct Tensor {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::int64_t from = 0, to = 0;  // offsets behind the header
  };

  static std::size_t number_of(const std::vector<std::int64_t>& shape) {
    std::size_t count = 1;
    for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
    return count;
  }

  void add(const std::string& name, const json::Value& entry) {
    const auto most = static_cast<std::int64_t>(bytes_.size() - begin_);
    Tensor tensor;
    tensor.dtype = entry.at("dtype").string();
    for (const json::Value& size : entry.at("shape").list())
      tensor.shape.push_back(size.integer(0, INT64_MAX));
    const auto& offsets = entry.at("data_offsets").list();
    if (offsets.size() != 2) throw json::Value::wrong("a tensor has not two offsets");
    tensor.from = offsets[0].integer(0, most), tensor.to = offsets[1].integer(0, most);
    tensors_[name] = std::move(tensor);
  }

  const Tensor& tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw json::Value::wrong("it has no tensor " + shown(name));
    return found->second;
  }

  // Tensors must follow each other without a gap and without an overlap.
  void verify_places() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> places;
    for (const auto& named : tensors_) places.emplace_back(named.second.from, named.second.to);
    std::sort(places.begin(), places.end());
    std::int64_t at = 0;
    for (const auto& [from, to] : places) {
      if (from != at || to < from) throw json::Value::wrong("its tensors overlap or leave a gap");
      at = to;
    }
    if (at != static_cast<std::int64_t>(bytes_.size() - begin_))
      throw json::Value::wrong("its tensors overlap or leave a gap");
  }

  const Bytes& bytes_;
  std::size_t begin_ = 0;
  MemoryIdentity identity_;
  std::string adopted_;
  std::unordered_map<std::string, Tensor> tensors_;
};

void save_streams(const Memory& memory, const std::filesystem::path& path) {
  const MemoryParts& parts = MemoryParts::of(memory);
  const std::size_t batch = memory.positions.size();
  if (batch != static_cast<std::size_t>(memory.batch()))
    throw Error(Fault::stream, "the memory needs exactly one position per stream.");
  Bytes numbers;
  const auto add = [&](const void* data, std::size_t num_bytes) {
    const auto* bytes = static_cast<const std::uint8_t*>(data);
    numbers.insert(numbers.end(), bytes, bytes + num_bytes);
  };
  std::size_t at = 0;
  std::string entries = header_entry("positions", "I64", {memory.batch()}, at, 8 * batch);
  add(memory.positions.data(), 8 * batch);
  for (std::size_t index = 0; index < parts.state.size(); ++index) {
    const State& state = parts.state[index];
    const std::size_t row = state.row_bytes(), first = numbers.size();
    add(parts.now[index].bytes.data(), row * batch);
    for (std::size_t number = 0; number < batch; ++number) {
      std::uint8_t* data = numbers.data() + first + number * row;
      if (is_finite(data, row, state.dtype)) continue;
      if (memory.positions[number] > 0)
        throw Error(Fault::stream, "row " + std::to_string(number) +
                                       " of the memory holds values that are not "
                                       "finite; start a new text in it (position 0) before saving.");
      std::memset(data, 0, row);  // a row that starts again sees nothing of it
    }
    std::vector<std::int64_t> shape = state.sizes;
    shape.insert(shape.begin(), memory.batch());
    entries += ", " + header_entry(state.name, facts_of(state.dtype).stored, shape, at, row * batch);
  }
  std::string adopted;
  for (std::size_t row = 0; row < batch; ++row) adopted += (row ? "," : "") + parts.adopted[row];
  std::string header = "{\"__metadata__\": {";
  const auto note = [&](const char* key, const std::string& value) {
    header += std::string("\"") + key + "\": \"" + value + "\", ";
  };
  note("format", stream_format);
  note("layout", parts.identity.layout);
  note("weights", parts.identity.weights);
  note("artefact", memory.owner());
  if (adopted.size() >= batch) note("adopted", adopted);  // not only the commas between the rows
  header += "\"sha256\": \"" + sha256(numbers.data(), numbers.size()) + "\"}, " + entries + "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // so that the numbers begin at a multiple of 8 bytes
  Bytes file;
  for (int byte = 0; byte < 8; ++byte)
    file.push_back(static_cast<std::uint8_t>(std::uint64_t{header.size()} >> (8 * byte)));
  file.insert(file.end(), header.begin(), header.end());
  file.insert(file.end(), numbers.begin(), numbers.end());
  write_file(path, file);
}

void refuse_other_memory(const StreamFile& file, const Spec& spec, const std::string& path, bool adopt) {
  if (file.identity().layout != spec.memory_identity.layout)
    throw Error(Fault::stream, path +
                                   " holds streams with another memory: its form, rule or vocabulary "
                                   "differs; open an artefact with the same ones, or start a new stream.");
  if (file.identity().weights != spec.memory_identity.weights && !adopt)
    throw Error(Fault::stream, path + " holds streams that other weights computed (" +
                                   shown(file.identity().weights.substr(0, 12)) + ", and this model has " +
                                   spec.memory_identity.weights.substr(0, 12) +
                                   "); load them with adopt = true to continue them with this model, or open "
                                   "a model with those weights.");
}

Memory load_streams(const Session& session, const std::filesystem::path& path, bool adopt) {
  const Spec& spec = session.spec();
  const Bytes bytes = read_file(path);
  const auto wrong = [](const std::string& what) { return json::Value::wrong(what); };
  try {
    const StreamFile file(bytes);
    refuse_other_memory(file, spec, path.string(), adopt);
    const std::vector<std::int64_t> streams = file.shape("positions");
    if (streams.size() != 1) throw wrong("its positions are no list");
    if (streams[0] < 1 || streams[0] > most_streams) throw wrong("it has not 1 to 65536 streams");
    const auto batch = static_cast<std::size_t>(streams[0]);
    // The whole file is compared with the artefact before memory of the size that it claims is taken.
    const std::uint8_t* stored = file.numbers("positions", "I64", streams, sizeof(std::int64_t) * batch);
    std::vector<std::int64_t> positions(batch);
    std::memcpy(positions.data(), stored, sizeof(std::int64_t) * batch);
    for (const std::int64_t position : positions)
      if (position > furthest_position || position < -furthest_position)
        throw wrong("a position is beyond 2^62");
    std::vector<StoredTensor> contents(spec.state.size());
    std::size_t known = 1;
    for (std::size_t index = 0; index < spec.state.size(); ++index) {
      if (spec.is_scale(index)) continue;
      contents[index] = file.memory(spec.state[index], streams[0]);
      known += contents[index].scales ? 2 : 1;
    }
    if (file.tensors() != known) throw wrong("it has not the tensors of this artefact's streams");
    Memory memory = session.start(streams[0]);
    MemoryParts& parts = MemoryParts::of(memory);
    memory.positions = std::move(positions);
    parts.adopted = file.adopted(batch);
    for (std::size_t index = 0; index < contents.size(); ++index) {
      const State& state = spec.state[index];
      if (spec.is_scale(index)) continue;  // written with its bytes
      const std::size_t width = state.sizes.empty() ? 1 : static_cast<std::size_t>(state.sizes.back());
      const std::size_t count = batch * state.row_bytes() / facts_of(state.dtype).num_bytes;
      std::uint8_t* scales = facts_of(state.dtype).scaled ? parts.now[index + 1].bytes.data() : nullptr;
      convert(contents[index], width ? count / width : 0, width, state.dtype, parts.now[index].bytes.data(),
              scales);
    }
    if (file.identity().weights != spec.memory_identity.weights)
      for (std::string& row : parts.adopted) row += (row.empty() ? "" : " ") + file.identity().weights;
    return memory;
  } catch (const Error& error) {
    if (error.fault() != Fault::artefact) throw;
    throw Error(Fault::artefact, path.string() + " is no stream that can be continued: " + error.what() +
                                     "; give a file that save or save_memory wrote.");
  }
}

}  // namespace
}  // namespace detail

void save(const Memory& memory, const std::string& path) {
  detail::in_memory("the file of streams", [&] { detail::save_streams(memory, path); });
}

Memory load(const Session& session, const std::string& path, bool adopt) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error(Fault::option, path + " is no file; give one that save or save_memory wrote.");
  return detail::in_memory("the file of streams", [&] { return detail::load_streams(session, path, adopt); });
}

}  // namespace xl_export
