// The memory of B streams, which the caller owns and a session reads and updates.
#ifndef XL_EXPORT_MEMORY_HPP
#define XL_EXPORT_MEMORY_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ort.hpp"
#include "spec.hpp"

namespace xl_export {

namespace detail {

struct Streams;
constexpr std::int64_t most_streams = 1 << 16;

// Whether all numbers of a tensor are finite: no exponent has all its bits set. All bytes are.
inline bool is_finite(const std::uint8_t* data, std::size_t num_bytes, ElementType type) {
  const auto all = [&](auto mask) {
    decltype(mask) bits;
    for (std::size_t at = 0; at + sizeof bits <= num_bytes; at += sizeof bits) {
      std::memcpy(&bits, data + at, sizeof bits);
      if ((bits & mask) == mask) return false;
    }
    return true;
  };
  const ElementFacts& facts = facts_of(type);
  if (!facts.exponent) return true;
  return facts.num_bytes == 2 ? all(static_cast<std::uint16_t>(facts.exponent)) : all(facts.exponent);
}

}  // namespace detail

class Session;

// The state of B independent streams. One thread at a time may use a memory; a session may serve many. A
// memory may outlive its session, and can then still be copied and saved.
class Memory {
 public:
  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;

  // The position of each row's next token. Setting one to 0 starts a new text in that row: nothing has to be
  // cleared, and no row sees the past of another. A position of -n makes the next n tokens of a row padding.
  std::vector<std::int64_t> positions;

  std::int64_t batch() const { return batch_; }
  const std::string& owner() const { return owner_; }  // the identity of the artefact

  // For each row, the hashes of the weights that computed its stream before other weights continued it, with
  // blanks between them.
  const std::vector<std::string>& adopted() const { return adopted_; }

  // An independent fork of all streams.
  Memory copy() const {
    return detail::ort::edge("the fork", [&] {
      Memory fork(state_, batch_, owner_, identity_, in_place_);
      fork.positions = positions;
      fork.unsure_ = unsure_;
      fork.adopted_ = adopted_;
      for (std::size_t index = 0; index < state_.size(); ++index) fork.now_[index].bytes = now_[index].bytes;
      fork.bind();
      return fork;
    });
  }

 private:
  friend class Session;
  friend struct detail::Streams;

  struct Tensor {
    detail::Bytes bytes;
    detail::ort::Value value;  // over these bytes
  };

  Memory(std::vector<State> state, std::int64_t batch, std::string owner, MemoryIdentity identity,
         bool in_place)
      : positions(static_cast<std::size_t>(batch)),
        state_(std::move(state)),
        batch_(batch),
        owner_(std::move(owner)),
        identity_(std::move(identity)),
        adopted_(static_cast<std::size_t>(batch)),
        in_place_(in_place),
        unsure_(static_cast<std::size_t>(batch)),
        now_(state_.size()),
        next_(in_place ? 0 : state_.size()) {
    for (auto* side : {&now_, &next_})
      for (std::size_t index = 0; index < side->size(); ++index)
        // A tensor of length 0 has bytes too: ONNX Runtime wants an address.
        (*side)[index].bytes.resize(std::max<std::size_t>(1, num_bytes(index)));
    bind();
  }

  std::size_t num_bytes(std::size_t index) const {
    return static_cast<std::size_t>(batch_) * state_[index].row_bytes();
  }

  // Makes the tensors of ONNX Runtime over the bytes, without copying them.
  void bind() {
    for (auto* side : {&now_, &next_})
      for (std::size_t index = 0; index < side->size(); ++index) {
        std::vector<std::int64_t> shape = state_[index].sizes;
        shape.insert(shape.begin(), batch_);
        Tensor& tensor = (*side)[index];
        tensor.value = detail::ort::tensor(tensor.bytes.data(), num_bytes(index), shape,
                                           detail::facts_of(state_[index].dtype).onnx);
      }
  }

  // What the mask hides counts with weight 0, and 0 times NaN is NaN: a text that overflowed could spoil the
  // next one in its row. So rows that start again are cleared if they may hold what is not finite: always,
  // unless the memory is a ring, which a step does not write whole, and whose logits show what it holds.
  void clear_restarted_rows() {
    for (std::size_t row = 0; row < positions.size(); ++row) {
      if (positions[row] > 0) continue;
      adopted_[row].clear();  // a new text was not adopted
      if (!unsure_[row]) continue;
      for (std::size_t index = 0; index < state_.size(); ++index) {
        const std::size_t size = state_[index].row_bytes();
        std::memset(now_[index].bytes.data() + row * size, 0, size);
      }
      unsure_[row] = false;
    }
  }
  void mark_unsure() { std::fill(unsure_.begin(), unsure_.end(), true); }

  // The ring is written in place. The other forms are read from one set and written to another, and the two
  // change places after each step.
  void advance() {
    if (!in_place_) std::swap(now_, next_);
  }
  std::vector<Tensor>& present() { return in_place_ ? now_ : next_; }

  std::vector<State> state_;
  std::int64_t batch_ = 0;
  std::string owner_;
  MemoryIdentity identity_;
  std::vector<std::string> adopted_;
  bool in_place_ = false;
  std::vector<bool> unsure_;  // whether each row may hold values that are not finite
  std::vector<Tensor> now_, next_;
};

}  // namespace xl_export

#endif
