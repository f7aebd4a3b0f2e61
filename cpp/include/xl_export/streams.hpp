// Saved streams: files that the Python package continues, and the other way round.
#ifndef XL_EXPORT_STREAMS_HPP
#define XL_EXPORT_STREAMS_HPP

#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "npz.hpp"
#include "session.hpp"

namespace xl_export {

namespace detail {

inline const char* numpy_type(ElementType type) { return type == ElementType::float16 ? "<f2" : "<f4"; }

inline std::string owner_of(const npz::Array& array) {  // a string of NumPy's: 4 bytes a character
  if (!array.shape.empty() || array.dtype.compare(0, 2, "<U") != 0) throw npz::damaged("its owner is no string");
  std::string owner;
  for (std::size_t at = 0; at + 4 <= array.data.size(); at += 4)
    if (array.data[at]) owner += static_cast<char>(array.data[at]);
  return owner;
}

}  // namespace detail

// Writes all streams of a memory to an .npz file, whole or not at all.
inline void save(const Memory& memory, const std::filesystem::path& path) {
  if (memory.positions.size() != static_cast<std::size_t>(memory.batch()))
    throw Error(Fault::stream, "the memory has not one position for each stream; give one to each.");
  detail::npz::Writer writer;
  std::vector<std::uint32_t> owner(memory.owner().begin(), memory.owner().end());
  writer.add("owner", "<U" + std::to_string(owner.size()), {}, owner.data(), 4 * owner.size());
  writer.add("positions", "<i8", {memory.batch()}, memory.positions.data(), 8 * memory.positions.size());
  for (std::size_t index = 0; index < memory.state_.size(); ++index) {
    const State& state = memory.state_[index];
    const std::size_t row = state.row_bytes();
    detail::Bytes bytes(memory.now_[index].bytes.begin(),
                        memory.now_[index].bytes.begin() +
                            static_cast<std::ptrdiff_t>(row * memory.positions.size()));
    for (std::size_t number = 0; number < memory.positions.size(); ++number) {
      if (detail::is_finite(bytes.data() + number * row, row, state.dtype)) continue;
      if (memory.positions[number] > 0)
        throw Error(Fault::stream, "row " + std::to_string(number) + " of the memory holds values that are not "
                                   "finite; start a new text in it (position 0) before saving.");
      std::memset(bytes.data() + number * row, 0, row);  // a row that starts again sees nothing of it
    }
    std::vector<std::int64_t> shape = state.sizes;
    shape.insert(shape.begin(), memory.batch());
    writer.add("tensor/" + state.past, detail::numpy_type(state.dtype), shape, bytes.data(), bytes.size());
  }
  detail::write_file(path, std::move(writer).finish());
}

// The memory in a file that `save`, or `save_memory` of the Python package, wrote. Throws where its streams
// belong to another artefact, and where the file is damaged.
inline Memory load(const Session& session, const std::filesystem::path& path) {
  const detail::Bytes bytes = detail::read_file(path);
  try {
    const auto arrays = detail::npz::parse(bytes);
    const auto array = [&](const std::string& name, const std::string& dtype) -> const detail::npz::Array& {
      const auto found = arrays.find(name);
      if (found == arrays.end()) throw detail::npz::damaged("it has not the arrays of this artefact's streams");
      if (!dtype.empty() && found->second.dtype != dtype) throw detail::npz::damaged("an array is of another type");
      return found->second;
    };
    const std::string owner = detail::owner_of(array("owner", ""));
    if (owner != session.spec().identity)
      throw Error(Fault::stream, path.string() + " holds the memory of artefact " + owner.substr(0, 12) +
                                     ", and this session runs " + session.spec().identity.substr(0, 12) +
                                     "; open the artefact that the stream was started on.");
    const detail::npz::Array& positions = array("positions", "<i8");
    if (positions.shape.size() != 1 || positions.data.size() != 8 * positions.count())
      throw detail::npz::damaged("its positions are no list");
    const std::size_t batch = positions.count();
    if (arrays.size() != 2 + session.spec().state.size()) throw detail::npz::damaged("it has other arrays too");
    Memory memory = session.start(static_cast<std::int64_t>(batch));
    std::memcpy(memory.positions.data(), positions.data.data(), positions.data.size());
    for (const std::int64_t at : memory.positions)
      if (at > std::int64_t{1} << 62 || at < -(std::int64_t{1} << 62))
        throw detail::npz::damaged("a position is beyond 2^62");
    for (std::size_t index = 0; index < session.spec().state.size(); ++index) {
      const State& state = session.spec().state[index];
      const detail::npz::Array& stored = array("tensor/" + state.past, detail::numpy_type(state.dtype));
      std::vector<std::int64_t> shape = state.sizes;
      shape.insert(shape.begin(), static_cast<std::int64_t>(batch));
      if (stored.shape != shape || stored.data.size() != batch * state.row_bytes())
        throw detail::npz::damaged("an array has another shape");
      if (!detail::is_finite(stored.data.data(), stored.data.size(), state.dtype))
        throw detail::npz::damaged("it holds values that are not finite");
      std::copy(stored.data.begin(), stored.data.end(), memory.now_[index].bytes.begin());
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
