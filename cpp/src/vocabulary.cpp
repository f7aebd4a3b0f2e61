#include "include/xl_export/vocabulary.hpp"

#include <algorithm>

#include "utf8.hpp"
#include "vocabularies.hpp"

namespace xl_export {

std::int64_t SpecialTokens::before_text() const {
  for (const std::int64_t token : {first, end_of_document, beginning, end_of_line})
    if (token >= 0) return token;
  return -1;
}

std::string_view Decoder::add(std::int64_t token) {
  append(static_cast<std::size_t>(token), held_);
  return decode(false);
}

std::string_view Decoder::rest() {
  return decode(true);
}

// Takes whole characters from the front of the held bytes; bytes that are no character become U+FFFD.
std::string_view Decoder::decode(bool last) {
  text_.clear();
  std::size_t at = 0;
  while (at < held_.size()) {
    const detail::Character found = detail::first_character(std::string_view(held_).substr(at));
    if (found.unfinished && !last) break;
    detail::append_utf8(text_, found.code);
    at += found.length;
  }
  if (!last) held_.erase(0, at);
  return text_;
}

std::string Vocabulary::decode(const std::vector<std::int64_t>& tokens) const {
  const auto one_by_one = decoder();
  std::string text;
  for (const std::int64_t token : tokens) {
    if (token < 0 || static_cast<std::size_t>(token) >= size())
      throw Error(Fault::text, "token " + std::to_string(token) +
                                   " is outside the vocabulary; expected 0 to " + std::to_string(size() - 1) +
                                   ".");
    text += one_by_one->add(token);
  }
  return text.append(one_by_one->rest());
}

namespace detail {

std::vector<std::string> read_symbols(const json::Value& list, const char* what) {
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

SpecialTokens read_special(const json::Value& document, std::int64_t size) {
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

std::vector<std::string> split_words(std::string_view text) {
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

void refuse_nul(std::string_view text) {
  const std::size_t at = text.find('\0');
  if (at != std::string_view::npos)
    throw Error(Fault::text, "byte " + std::to_string(at) +
                                 " of the text is NUL, so it is no text; give a text, or "
                                 "use a model with a byte vocabulary.");
}

}  // namespace detail
}  // namespace xl_export
