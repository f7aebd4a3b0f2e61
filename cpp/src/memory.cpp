#include "include/xl_export/memory.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "element_types.hpp"
#include "memory_parts.hpp"

namespace xl_export {

Memory::Memory(std::unique_ptr<detail::MemoryParts> parts)
    : positions(static_cast<std::size_t>(parts->batch)), parts_(std::move(parts)) {}
Memory::Memory(Memory&&) noexcept = default;
Memory& Memory::operator=(Memory&&) noexcept = default;
Memory::~Memory() = default;

std::int64_t Memory::batch() const {
  return parts_->batch;
}

const std::string& Memory::owner() const {
  return parts_->owner;
}

const std::vector<std::string>& Memory::adopted() const {
  return parts_->adopted;
}

Memory Memory::copy() const {
  return detail::ort::edge("the fork", [&] {
    const detail::MemoryParts& from = *parts_;
    Memory fork = detail::MemoryParts::make(from.state, from.batch, from.owner, from.identity, from.in_place);
    fork.positions = positions;
    fork.parts_->unsure = from.unsure;
    fork.parts_->adopted = from.adopted;
    // Into the bytes that are there, over which the tensors are made.
    for (std::size_t index = 0; index < from.now.size(); ++index)
      std::copy(from.now[index].bytes.begin(), from.now[index].bytes.end(),
                fork.parts_->now[index].bytes.begin());
    return fork;
  });
}

namespace detail {

bool is_finite(const std::uint8_t* data, std::size_t num_bytes, ElementType type) {
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

void Bound::bind(void* data, ONNXTensorElementDataType type, std::initializer_list<std::int64_t> front,
                 const std::vector<std::int64_t>& back) {
  const auto middle = static_cast<std::ptrdiff_t>(front.size());
  if (value_ && data == data_ && shape_.size() == front.size() + back.size() &&
      std::equal(front.begin(), front.end(), shape_.begin()) &&
      std::equal(back.begin(), back.end(), shape_.begin() + middle))
    return;
  value_.reset();  // if this fails, the next step must not use the old tensor
  shape_.assign(front);
  shape_.insert(shape_.end(), back.begin(), back.end());
  data_ = data;
  value_ = ort::tensor(data, shape_, type);
}

Memory MemoryParts::make(std::vector<State> state, std::int64_t batch, std::string owner,
                         MemoryIdentity identity, bool in_place) {
  return Memory(std::make_unique<MemoryParts>(std::move(state), batch, std::move(owner), std::move(identity),
                                              in_place));
}

MemoryParts::MemoryParts(std::vector<State> states, std::int64_t rows, std::string artefact,
                         MemoryIdentity continues, bool one_set)
    : state(std::move(states)),
      batch(rows),
      owner(std::move(artefact)),
      identity(std::move(continues)),
      adopted(static_cast<std::size_t>(batch)),
      in_place(one_set),
      unsure(static_cast<std::size_t>(batch)),
      now(state.size()),
      next(in_place ? 0 : state.size()) {
  for (auto* side : {&now, &next})
    for (std::size_t index = 0; index < side->size(); ++index) {
      Tensor& tensor = (*side)[index];
      // A tensor of length 0 has bytes too: ONNX Runtime wants an address.
      tensor.bytes.resize(std::max<std::size_t>(1, num_bytes(index)));
      std::vector<std::int64_t> shape = state[index].sizes;
      shape.insert(shape.begin(), batch);
      tensor.value = ort::tensor(tensor.bytes.data(), shape, facts_of(state[index].dtype).onnx);
    }
}

void MemoryParts::clear_restarted_rows(const std::vector<std::int64_t>& positions) {
  for (std::size_t row = 0; row < positions.size(); ++row) {
    if (positions[row] > 0) continue;
    adopted[row].clear();  // a new text was not adopted
    if (!unsure[row]) continue;
    for (std::size_t index = 0; index < state.size(); ++index) {
      const std::size_t size = state[index].row_bytes();
      std::memset(now[index].bytes.data() + row * size, 0, size);
    }
    unsure[row] = false;
  }
}

void MemoryParts::mark_unsure() {
  std::fill(unsure.begin(), unsure.end(), true);
}

void MemoryParts::advance() {
  if (!in_place) std::swap(now, next);
}

}  // namespace detail
}  // namespace xl_export
