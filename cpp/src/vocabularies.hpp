// The kinds of vocabularies, made from `vocab.json`, and what their readers share.
#ifndef XL_EXPORT_VOCABULARIES_HPP
#define XL_EXPORT_VOCABULARIES_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "file.hpp"
#include "include/xl_export/vocabulary.hpp"
#include "json.hpp"

namespace xl_export::detail {

// A vocabulary that is whole in its file: kind byte, char, word or ids.
std::unique_ptr<Vocabulary> make_symbols(const std::string& kind, const json::Value& document);

// tokenizer: the content of tokenizer.json; null if the library is another.
std::unique_ptr<Vocabulary> make_subwords(const json::Value& document, const Bytes* tokenizer);

// A decoder that calls append(token, bytes), which adds the token's bytes.
template <class Append>
std::unique_ptr<Decoder> decoder_of(Append append) {
  struct Made final : Decoder {
    explicit Made(Append given) : append_(std::move(given)) {}
    void append(std::size_t token, std::string& bytes) override { append_(token, bytes); }
    Append append_;
  };
  return std::make_unique<Made>(std::move(append));
}

std::vector<std::string> read_symbols(const json::Value& list, const char* what);
SpecialTokens read_special(const json::Value& document, std::int64_t size);

// The words of a text between white space, as Python's str.split() finds them.
std::vector<std::string> split_words(std::string_view text);

// A text with a NUL is a file that is no text, which would be read as unknown words.
void refuse_nul(std::string_view text);

}  // namespace xl_export::detail

#endif
