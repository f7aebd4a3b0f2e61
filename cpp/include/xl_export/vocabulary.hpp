// Vocabularies: the tokens of a text, and the text of tokens. A vocabulary is read from `vocab.json` and the
// file next to it, and is never built.
#ifndef XL_EXPORT_VOCABULARY_HPP
#define XL_EXPORT_VOCABULARY_HPP

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "error.hpp"

namespace xl_export {

// The ids of tokens with a meaning of their own; -1 where a vocabulary has no such token.
struct SpecialTokens {
  std::int64_t end_of_document = -1;  // ends a generated text
  std::int64_t beginning = -1;
  std::int64_t unknown = -1;
  std::int64_t padding = -1;
  std::int64_t end_of_line = -1;
  std::int64_t first = -1;  // preceded each text in training

  // The token from which a model has learned to predict the first token of a text.
  std::int64_t before_text() const;
};

// Decodes one stream of tokens. What add() returns for its tokens one by one, and then rest(), is together
// the text of all of them. Each is valid until the next call.
class Decoder {
 public:
  Decoder() {
    for (std::string* text : {&held_, &text_}) text->reserve(64);  // longer than most tokens
  }
  virtual ~Decoder() = default;

  // The text that one more token settles: no later token can change it.
  std::string_view add(std::int64_t token);
  // The text that would follow if the stream ended here, such as U+FFFD for half a character.
  std::string_view rest();

 private:
  // Appends what a token adds to a text, in UTF-8; a character may be spread over several tokens.
  virtual void append(std::size_t token, std::string& bytes) = 0;
  std::string_view decode(bool last);

  std::string held_, text_;
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

  std::string decode(const std::vector<std::int64_t>& tokens) const;
  const SpecialTokens& special() const { return special_; }

 protected:
  SpecialTokens special_;
};

}  // namespace xl_export

#endif
