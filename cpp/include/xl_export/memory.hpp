// The memory of B streams, which the caller owns and a session reads and updates.
#ifndef XL_EXPORT_MEMORY_HPP
#define XL_EXPORT_MEMORY_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace xl_export {

namespace detail {
struct MemoryParts;
}

// The state of B independent streams. One thread at a time may use a memory; a session may serve many. A
// memory may outlive its session, and can then still be copied and saved.
//
// It also keeps what the last step needed besides, so that a step of the same size allocates nothing.
class Memory {
 public:
  Memory(Memory&&) noexcept;
  Memory& operator=(Memory&&) noexcept;
  ~Memory();

  // The position of each row's next token. Setting one to 0 starts a new text in that row: nothing has to be
  // cleared, and no row sees the past of another. A position of -n makes the next n tokens of a row padding.
  std::vector<std::int64_t> positions;

  std::int64_t batch() const;
  const std::string& owner() const;  // the identity of the artefact

  // For each row, the hashes of the weights that computed its stream before other weights continued it, with
  // blanks between them.
  const std::vector<std::string>& adopted() const;

  // An independent fork of all streams.
  Memory copy() const;

 private:
  friend struct detail::MemoryParts;
  explicit Memory(std::unique_ptr<detail::MemoryParts> parts);

  std::unique_ptr<detail::MemoryParts> parts_;
};

}  // namespace xl_export

#endif
