// What a memory holds.
#ifndef XL_EXPORT_MEMORY_PARTS_HPP
#define XL_EXPORT_MEMORY_PARTS_HPP

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "file.hpp"
#include "include/xl_export/memory.hpp"
#include "include/xl_export/spec.hpp"
#include "ort.hpp"

namespace xl_export::detail {

constexpr std::int64_t most_streams = 1 << 16;

// Whether all numbers of a tensor are finite: no exponent has all its bits set. All bytes are.
bool is_finite(const std::uint8_t* data, std::size_t num_bytes, ElementType type);

// A tensor over numbers that it does not own. It is made anew only if they moved or their shape changed.
class Bound {
 public:
  // shape: `front`, then `back`.
  void bind(void* data, ONNXTensorElementDataType type, std::initializer_list<std::int64_t> front,
            const std::vector<std::int64_t>& back = {});
  OrtValue* get() const { return value_.get(); }

 private:
  ort::Value value_;
  const void* data_ = nullptr;
  std::vector<std::int64_t> shape_;
};

// What a step needs besides its memory. It stays with the memory, so that the next one allocates nothing.
struct Prepared {
  std::vector<std::int64_t> ids, places, targets, rows;
  std::vector<float> log_probs;  // for a caller who wants none
  std::vector<float> logits;     // of all tokens, if the caller wants only some
  float nothing = 0;             // has the address that stands for no logits
  std::vector<Bound> fed, returned;
  std::vector<const OrtValue*> inputs;  // with the memory
  std::vector<OrtValue*> outputs;
};

struct MemoryParts {
  struct Tensor {
    Bytes bytes;
    ort::Value value;  // over these bytes
  };

  static Memory make(std::vector<State> state, std::int64_t batch, std::string owner, MemoryIdentity identity,
                     bool in_place);
  static MemoryParts& of(Memory& memory) { return *memory.parts_; }
  static const MemoryParts& of(const Memory& memory) { return *memory.parts_; }

  MemoryParts(std::vector<State> state, std::int64_t batch, std::string owner, MemoryIdentity identity,
              bool in_place);

  std::size_t num_bytes(std::size_t index) const {
    return static_cast<std::size_t>(batch) * state[index].row_bytes();
  }

  // What the mask hides counts with weight 0, and 0 times NaN is NaN: a text that overflowed could spoil the
  // next one in its row. So rows that start again are cleared if they may hold what is not finite: always,
  // unless the memory is a ring, which a step does not write whole, and whose logits show what it holds.
  void clear_restarted_rows(const std::vector<std::int64_t>& positions);
  void mark_unsure();

  // The ring is written in place. The other forms are read from one set and written to another, and the two
  // change places after each step.
  void advance();
  std::vector<Tensor>& present() { return in_place ? now : next; }

  std::vector<State> state;
  std::int64_t batch;
  std::string owner;
  MemoryIdentity identity;
  std::vector<std::string> adopted;
  bool in_place;
  std::vector<bool> unsure;  // whether each row may hold values that are not finite
  std::vector<Tensor> now, next;
  Prepared prepared;
};

}  // namespace xl_export::detail

#endif
