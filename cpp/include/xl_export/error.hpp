// What every function of this library throws, and views of the caller's numbers.
#ifndef XL_EXPORT_ERROR_HPP
#define XL_EXPORT_ERROR_HPP

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace xl_export {

// What went wrong: the files of an artefact, a stream or a step, a text, or an option of the caller.
enum class Fault { artefact, stream, text, option };

// One sentence that says what was given, what was expected, and how to fix it.
class Error : public std::runtime_error {
 public:
  Error(Fault fault, const std::string& sentence) : std::runtime_error(sentence), fault_(fault) {}

  Fault fault() const noexcept { return fault_; }

 private:
  Fault fault_;
};

// Consecutive numbers of another owner, like std::span of C++20: valid while the owner lives.
template <class T>
class View {
 public:
  View() = default;
  View(const T* data, std::size_t size) : data_(data), size_(size) {}
  View(const std::vector<T>& owner) : data_(owner.data()), size_(owner.size()) {}

  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  const T& operator[](std::size_t index) const { return data_[index]; }
  View part(std::size_t from, std::size_t count) const { return View(data_ + from, count); }

 private:
  const T* data_ = nullptr;
  std::size_t size_ = 0;
};

// The same, to write to.
template <class T>
class Span {
 public:
  Span(T* data, std::size_t size) : data_(data), size_(size) {}
  Span(std::vector<T>& owner) : data_(owner.data()), size_(owner.size()) {}

  T* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  T* data_;
  std::size_t size_;
};

}  // namespace xl_export

#endif
