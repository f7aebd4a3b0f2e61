#include "json.hpp"

#include <algorithm>
#include <charconv>
#include <locale>
#include <sstream>

#include "utf8.hpp"

namespace xl_export::detail::json {

const Value* Value::find(std::string_view key) const {
  if (kind != Kind::object) throw wrong("an object was expected instead of " + shown_kind());
  const auto found = std::find(keys.begin(), keys.end(), key);
  return found == keys.end() ? nullptr : &items[static_cast<std::size_t>(found - keys.begin())];
}

const Value& Value::at(std::string_view key) const {
  if (const Value* found = find(key)) return *found;
  throw wrong("it has no \"" + std::string(key) + "\"");
}

const std::string& Value::string() const {
  if (kind != Kind::string) throw wrong("a string was expected instead of " + shown_kind());
  return text;
}

const std::vector<Value>& Value::list() const {
  if (kind != Kind::list) throw wrong("a list was expected instead of " + shown_kind());
  return items;
}

bool Value::boolean() const {
  if (kind != Kind::boolean) throw wrong("true or false was expected instead of " + shown_kind());
  return text == "true";
}

std::int64_t Value::integer(std::int64_t least, std::int64_t most) const {
  std::int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  if (kind != Kind::number || parsed.ec != std::errc() || parsed.ptr != end || value < least || value > most)
    throw wrong("an integer from " + std::to_string(least) + " to " + std::to_string(most) +
                " was expected instead of " + shown_kind());
  return value;
}

double Value::number() const {
  // A stream, since std::from_chars of a double is missing in some compilers' libraries.
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  double value = 0;
  if (kind != Kind::number || !(stream >> value) || !stream.eof())
    throw wrong("a number was expected instead of " + shown_kind());
  return value;
}

std::string Value::shown_kind() const {
  static constexpr const char* names[] = {"null", "", "", "a string", "a list", "an object"};
  return kind == Kind::boolean || kind == Kind::number ? shown(text, 40)
                                                       : names[static_cast<std::size_t>(kind)];
}

namespace {

class Parser {
 public:
  Parser(std::string_view text, std::size_t most_values) : text_(text), left_(most_values) {}

  Value parse() {
    Value value = parse_value(0);
    skip_blanks();
    if (at_ != text_.size()) throw damaged();
    return value;
  }

 private:
  static constexpr int deepest = 64;

  Error damaged() const { return Value::wrong("it is no JSON from byte " + std::to_string(at_) + " on"); }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_blanks() {
    while (at_ < text_.size() && (peek() == ' ' || peek() == '\n' || peek() == '\r' || peek() == '\t')) ++at_;
  }

  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Value parse_value(int depth) {
    if (depth > deepest) throw Value::wrong("its values are nested too deeply");
    if (left_ == 0) throw Value::wrong("it has more values than any file of its kind");
    --left_;
    skip_blanks();
    Value value;
    if (peek() == '{') {
      parse_object(value, depth);
    } else if (peek() == '[') {
      parse_list(value, depth);
    } else if (peek() == '"') {
      value.kind = Kind::string;
      value.text = parse_string();
    } else if (take("true")) {
      value.kind = Kind::boolean, value.text = "true";
    } else if (take("false")) {
      value.kind = Kind::boolean, value.text = "false";
    } else if (!take("null")) {
      value.kind = Kind::number;
      value.text = parse_number();
    }
    return value;
  }

  void parse_list(Value& value, int depth) {
    value.kind = Kind::list;
    ++at_, skip_blanks();
    if (take("]")) return;
    do {
      value.items.push_back(parse_value(depth + 1));
      skip_blanks();
    } while (take(","));
    if (!take("]")) throw damaged();
  }

  void parse_object(Value& value, int depth) {
    value.kind = Kind::object;
    ++at_, skip_blanks();
    if (take("}")) return;
    do {
      skip_blanks();
      if (peek() != '"') throw damaged();
      value.keys.push_back(parse_string());
      skip_blanks();
      if (!take(":")) throw damaged();
      value.items.push_back(parse_value(depth + 1));
      skip_blanks();
    } while (take(","));
    if (!take("}")) throw damaged();
    // Readers differ in which of two equal keys they take, so a file with both has no one meaning.
    std::vector<std::string_view> sorted(value.keys.begin(), value.keys.end());
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      throw Value::wrong("it has a key twice");
  }

  std::string parse_number() {
    const std::size_t from = at_;
    const auto digits = [&] {
      const std::size_t first = at_;
      while (peek() >= '0' && peek() <= '9') ++at_;
      return at_ - first;
    };
    take("-");
    const bool zero = peek() == '0';
    const std::size_t whole = digits();
    if (whole == 0 || (zero && whole > 1)) throw damaged();
    if (take(".") && digits() == 0) throw damaged();
    if (take("e") || take("E")) {
      if (!take("+")) take("-");
      if (digits() == 0) throw damaged();
    }
    return std::string(text_.substr(from, at_ - from));
  }

  char32_t parse_hexadecimal() {
    unsigned value = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() != 4 || parsed.ec != std::errc() || parsed.ptr != digits.data() + 4) throw damaged();
    at_ += 4;
    return value;
  }

  std::string parse_string() {
    std::string out;
    ++at_;
    while (!take("\"")) {
      if (at_ >= text_.size() || static_cast<unsigned char>(peek()) < 0x20) throw damaged();
      if (!take("\\")) {
        const Character found = first_character(text_.substr(at_));
        if (!found.valid) throw damaged();
        out += text_.substr(at_, found.length);
        at_ += found.length;
        continue;
      }
      static constexpr std::string_view escapes = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
      if (take("u")) {
        char32_t code = parse_hexadecimal();
        if (code >= 0xd800 && code < 0xdc00 && take("\\u")) {
          const char32_t low = parse_hexadecimal();
          if (low < 0xdc00 || low > 0xdfff) throw damaged();
          code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        }
        if (code >= 0xd800 && code <= 0xdfff) throw Value::wrong("it has half of a surrogate pair");
        append_utf8(out, code);
      } else {
        const std::size_t which = escapes.find(peek());
        if (at_ >= text_.size() || which == std::string_view::npos) throw damaged();
        out += meant[which];
        ++at_;
      }
    }
    return out;
  }

  std::string_view text_;
  std::size_t left_, at_ = 0;
};

}  // namespace

Value parse(std::string_view text, std::size_t most_values) {
  return Parser(text, most_values).parse();
}

void append_string(std::string& out, std::string_view text) {
  static constexpr std::string_view meant = "\"\\\b\f\n\r\t", escapes = "\"\\bfnrt";
  out += '"';
  for (const char byte : text) {
    const std::size_t which = meant.find(byte);
    if (which != std::string_view::npos) {
      out += '\\', out += escapes[which];
    } else if (static_cast<unsigned char>(byte) < 0x20) {
      out += "\\u00", out += "0123456789abcdef"[byte >> 4], out += "0123456789abcdef"[byte & 15];
    } else {
      out += byte;
    }
  }
  out += '"';
}

}  // namespace xl_export::detail::json
