// A strict reader of JSON with a bound on the number of values and on their nesting, and a writer of strings.
#ifndef XL_EXPORT_JSON_HPP
#define XL_EXPORT_JSON_HPP

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "include/xl_export/error.hpp"

namespace xl_export::detail::json {

enum class Kind { null, boolean, number, string, list, object };

// One value. Every accessor throws an Error where the value is of another kind; the message is half a
// sentence, to which the caller adds the file.
class Value {
 public:
  Kind kind = Kind::null;
  std::string text;               // of a string, in UTF-8; of a number, as it is written; "true" or "false"
  std::vector<std::string> keys;  // of an object, in the order of the file
  std::vector<Value> items;       // of a list, or the values of an object

  bool is(Kind wanted) const { return kind == wanted; }

  // The value of a key; null if the object lacks it.
  const Value* find(std::string_view key) const;
  const Value& at(std::string_view key) const;
  const std::string& string() const;
  const std::vector<Value>& list() const;
  bool boolean() const;
  std::int64_t integer(std::int64_t least = INT64_MIN, std::int64_t most = INT64_MAX) const;
  double number() const;

  static Error wrong(const std::string& what) { return Error(Fault::artefact, what); }

  std::string shown_kind() const;
};

// The value of a text. A value takes 50 times the room of its text, so a file has a largest number of them.
Value parse(std::string_view text, std::size_t most_values = std::size_t{1} << 20);

// Appends a text in UTF-8 as a string.
void append_string(std::string& out, std::string_view text);

}  // namespace xl_export::detail::json

#endif
