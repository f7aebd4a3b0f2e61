// Vocabularies: the tokens of a text, and the text of tokens. A vocabulary is read from `vocab.json` and the
// file next to it, and is never built.
#ifndef XL_EXPORT_VOCABULARY_HPP
#define XL_EXPORT_VOCABULARY_HPP

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../json.hpp"
#include "../utf8.hpp"

namespace xl_export {

// The ids of tokens with a meaning of their own; -1 where a vocabulary has no such token.
struct SpecialTokens {
  std::int64_t end_of_document = -1;  // ends a generated text
  std::int64_t beginning = -1;
  std::int64_t unknown = -1;
  std::int64_t padding = -1;
  std::int64_t end_of_line = -1;
  std::int64_t first = -1;  // preceded each text in training
};

// Decodes one stream of tokens. What add() returns for its tokens one by one, and then rest(), is together
// the text of all of them.
class Decoder {
 public:
  // bytes_of: what a token adds to a text, in UTF-8; a character may be spread over several tokens.
  explicit Decoder(std::function<std::string(std::size_t)> bytes_of) : bytes_of_(std::move(bytes_of)) {}

  // The text that one more token settles: no later token can change it.
  std::string add(std::int64_t token) { return utf8_.add(bytes_of_(static_cast<std::size_t>(token))); }
  // The text that would follow if the stream ended here, such as U+FFFD for half a character.
  std::string rest() const { return detail::Utf8Decoder(utf8_).add({}, true); }

 private:
  std::function<std::string(std::size_t)> bytes_of_;
  detail::Utf8Decoder utf8_;
};

class Vocabulary {
 public:
  virtual ~Vocabulary() = default;

  virtual std::string_view kind() const = 0;  // byte, char, word, subword or ids
  virtual std::size_t size() const = 0;
  // The tokens of a text in UTF-8 (any bytes for a vocabulary of bytes); throws for what it cannot hold.
  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;
  // A decoder, valid while the vocabulary lives. Its tokens are below size().
  virtual std::unique_ptr<Decoder> decoder() const = 0;

  const SpecialTokens& special() const { return special_; }

  std::string decode(const std::vector<std::int64_t>& tokens) const {
    const auto one_by_one = decoder();
    std::string text;
    for (const std::int64_t token : tokens) {
      if (token < 0 || static_cast<std::size_t>(token) >= size())
        throw Error(Fault::text, "token " + std::to_string(token) +
                                     " is outside the vocabulary; expected 0 to " +
                                     std::to_string(size() - 1) + ".");
      text += one_by_one->add(token);
    }
    return text + one_by_one->rest();
  }

 protected:
  SpecialTokens special_;
};

namespace detail {

inline std::vector<std::string> read_symbols(const json::Value& list, const char* what) {
  std::vector<std::string> symbols;
  for (const json::Value& symbol : list.list()) {
    symbols.push_back(symbol.string());
    if (symbols.back().empty()) throw json::Value::wrong(std::string("one of its ") + what + " is empty");
  }
  std::vector<std::string_view> sorted(symbols.begin(), symbols.end());
  std::sort(sorted.begin(), sorted.end());
  if (symbols.empty() || std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
    throw json::Value::wrong(std::string("its ") + what + " repeat or are none");
  return symbols;
}

inline SpecialTokens read_special(const json::Value& document, std::int64_t size) {
  SpecialTokens special;
  const json::Value* told = document.find("special");
  if (!told) return special;
  const auto read = [&](const char* name, std::int64_t& id) {
    if (const json::Value* found = told->find(name)) id = found->integer(0, size - 1);
  };
  read("end_of_document", special.end_of_document);
  read("beginning", special.beginning);
  read("first", special.first);
  read("unknown", special.unknown);
  read("padding", special.padding);
  read("end_of_line", special.end_of_line);
  return special;
}

// The words of a text between white space, as Python's str.split() finds them.
inline std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> words;
  bool inside = false;
  for (const char32_t code : characters(text)) {
    const bool space = is_space(code);
    if (!space && !inside) words.emplace_back();
    if (!space) append_utf8(words.back(), code);
    inside = !space;
  }
  return words;
}

// A text with a NUL is a file that is no text, which would be read as unknown words.
inline void refuse_nul(std::string_view text) {
  const std::size_t at = text.find('\0');
  if (at != std::string_view::npos)
    throw Error(Fault::text, "byte " + std::to_string(at) +
                                 " of the text is NUL, so it is no text; give a text, or "
                                 "use a model with a byte vocabulary.");
}

}  // namespace detail
}  // namespace xl_export

#endif
