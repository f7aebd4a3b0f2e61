// Saved streams: files that the Python package and the ES module continue, and the other way round. They have
// the layout of safetensors: the length of a header, the header in JSON, and the numbers without a gap.
#ifndef XL_EXPORT_STREAMS_HPP
#define XL_EXPORT_STREAMS_HPP

#include <string>

#include "session.hpp"

namespace xl_export {

// Writes all streams of a memory to a file, whole or not at all.
void save(const Memory& memory, const std::string& path);

// The memory in a file of saved streams. It may be of another artefact with the same `memory_identity`, and a
// memory of another precision is converted. With `adopt`, streams that other weights computed continue too,
// and `Memory::adopted` records it. Throws if the session cannot continue the streams or the file is damaged.
Memory load(const Session& session, const std::string& path, bool adopt = false);

}  // namespace xl_export

#endif
