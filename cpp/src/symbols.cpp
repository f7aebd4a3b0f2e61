// Vocabularies that are whole in their `vocab.json`: bytes, characters, words, and ids of another program.
#include <array>
#include <optional>
#include <unordered_map>
#include <utility>

#include "limits.hpp"
#include "utf8.hpp"
#include "vocabularies.hpp"

namespace xl_export::detail {
namespace {

// Names of tokens, and the token of each name.
class Symbols {
 public:
  explicit Symbols(std::vector<std::string> names) : names_(std::move(names)) {
    for (std::size_t id = 0; id < names_.size(); ++id) ids_[names_[id]] = static_cast<std::int64_t>(id);
  }

  std::size_t size() const { return names_.size(); }
  const std::string& name(std::size_t id) const { return names_[id]; }
  std::int64_t id(const std::string& name) const {  // -1 for none
    const auto found = ids_.find(name);
    return found == ids_.end() ? -1 : found->second;
  }

 private:
  std::vector<std::string> names_;
  std::unordered_map<std::string, std::int64_t> ids_;
};

// Each byte is a token. Decoding returns a character of UTF-8 when its last byte has come.
class ByteVocabulary final : public Vocabulary {
 public:
  explicit ByteVocabulary(const json::Value& document) {
    ids_.fill(unknown_byte);
    if (const json::Value* values = document.find("values")) {
      for (const json::Value& value : values->list()) values_.push_back(value.integer(0, 255));
    } else {
      for (std::int64_t value = 0; value < 256; ++value) values_.push_back(value);
    }
    for (std::size_t id = 0; id < values_.size(); ++id) {
      std::int64_t& place = ids_[static_cast<std::size_t>(values_[id])];
      if (place != unknown_byte) throw json::Value::wrong("its values repeat");
      place = static_cast<std::int64_t>(id);
    }
    if (values_.empty()) throw json::Value::wrong("it has no values");
    if (const json::Value* skipped = document.find("skipped"))
      for (const json::Value& value : skipped->list())
        ids_[static_cast<std::size_t>(value.integer(0, 255))] = skipped_byte;
  }

  std::string_view kind() const override { return "byte"; }
  std::size_t size() const override { return values_.size(); }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> tokens;
    for (std::size_t at = 0; at < text.size(); ++at) {
      const auto byte = static_cast<unsigned char>(text[at]);
      const std::int64_t id = ids_[byte];
      if (id == unknown_byte)
        throw Error(Fault::text, "the text has the byte " + std::to_string(byte) + " at byte " +
                                     std::to_string(at) + ", which is not among the " +
                                     std::to_string(size()) +
                                     " bytes that this model was trained on; remove it from the text.");
      if (id != skipped_byte) tokens.push_back(id);
    }
    return tokens;
  }

  std::unique_ptr<Decoder> decoder() const override {
    return decoder_of(
        [this](std::size_t token, std::string& bytes) { bytes += static_cast<char>(values_[token]); });
  }

 private:
  static constexpr std::int64_t unknown_byte = -1, skipped_byte = -2;
  std::vector<std::int64_t> values_;
  std::array<std::int64_t, 256> ids_{};
};

// Each Unicode character is a token. A character that training did not see is refused.
class CharVocabulary final : public Vocabulary {
 public:
  explicit CharVocabulary(const json::Value& document)
      : symbols_(read_symbols(document.at("symbols"), "symbols")) {
    for (std::size_t id = 0; id < symbols_.size(); ++id)
      if (first_character(symbols_.name(id)).length != symbols_.name(id).size())
        throw json::Value::wrong("a symbol is longer than one character");
  }

  std::string_view kind() const override { return "char"; }
  std::size_t size() const override { return symbols_.size(); }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> tokens;
    for (const char32_t code : characters(text)) {
      std::string symbol;
      append_utf8(symbol, code);
      const std::int64_t id = symbols_.id(symbol);
      if (id < 0)
        throw Error(Fault::text,
                    "'" + shown(symbol) + "', character " + std::to_string(tokens.size() + 1) +
                        " of the text, is not among the " + std::to_string(size()) +
                        " characters that this model was trained on; remove it from the text, or "
                        "train on text that has it.");
      tokens.push_back(id);
    }
    return tokens;
  }

  std::unique_ptr<Decoder> decoder() const override {
    return decoder_of([this](std::size_t token, std::string& bytes) { bytes += symbols_.name(token); });
  }

 private:
  Symbols symbols_;
};

// Each word between white space is a token. A word outside of the vocabulary becomes the unknown one.
class WordVocabulary final : public Vocabulary {
 public:
  explicit WordVocabulary(const json::Value& document)
      : symbols_(read_symbols(document.at("symbols"), "symbols")),
        unknown_(mark(document, "unknown").value_or("<unk>")),
        end_of_line_(document.find("end_of_line") ? mark(document, "end_of_line") : "<eos>"),
        start_of_line_(mark(document, "start_of_line")) {
    if (const json::Value* lower = document.find("lower_case")) lower_case_ = lower->boolean();
    special_.unknown = symbols_.id(unknown_);
    if (end_of_line_) special_.end_of_line = symbols_.id(*end_of_line_);
    if (start_of_line_) special_.beginning = symbols_.id(*start_of_line_);
  }

  std::string_view kind() const override { return "word"; }
  std::size_t size() const override { return symbols_.size(); }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    refuse_nul(text);
    std::vector<std::int64_t> tokens;
    const std::string lowered = lower_case_ ? lower(text) : std::string();
    if (lower_case_) text = lowered;
    const auto add = [&](const std::string& word) {
      const std::int64_t known = symbols_.id(word), id = known < 0 ? special_.unknown : known;
      if (id < 0)
        throw Error(Fault::text, "'" + shown(word) + "', token " + std::to_string(tokens.size() + 1) +
                                     " of the text, is not among the " + std::to_string(size()) +
                                     " words of this model, which has no " + unknown_ +
                                     "; remove it from the "
                                     "text.");
      tokens.push_back(id);
    };
    for (bool first = true, more = true; more; first = false) {
      const std::size_t end = text.find('\n');
      more = end != std::string_view::npos;
      const std::vector<std::string> words = split_words(text.substr(0, end));
      if (!first && end_of_line_) add(*end_of_line_);
      if (start_of_line_ && (!words.empty() || more)) add(*start_of_line_);
      for (const std::string& word : words) add(word);
      if (more) text.remove_prefix(end + 1);
    }
    return tokens;
  }

  // Decoding puts one blank between the words of a line, so it restores a text but not its white space.
  std::unique_ptr<Decoder> decoder() const override {
    return decoder_of(
        [this, at_line_start = true, begun = !start_of_line_](std::size_t token, std::string& bytes) mutable {
          const std::string& symbol = symbols_.name(token);
          if (!begun && symbol == *start_of_line_) {
            begun = true;
            return;
          }
          const bool line_ends = (end_of_line_ && symbol == *end_of_line_) || symbol == "\n";
          if (!at_line_start && !line_ends) bytes += ' ';
          if (line_ends)
            bytes += '\n';
          else
            bytes += symbol;
          at_line_start = line_ends;
          begun = !start_of_line_ || !at_line_start;
        });
  }

 private:
  // A symbol with a meaning; nothing where it is absent or null.
  static std::optional<std::string> mark(const json::Value& document, const char* name) {
    const json::Value* found = document.find(name);
    if (!found || found->is(json::Kind::null)) return std::nullopt;
    if (split_words(found->string()) != std::vector<std::string>{found->string()})
      throw json::Value::wrong(std::string("its ") + name + " is not a single word");
    return found->string();
  }

  static std::string lower(std::string_view text) {
    std::string lowered(text);
    for (char& byte : lowered) {
      if (static_cast<unsigned char>(byte) >= 0x80)
        throw Error(Fault::text,
                    "this model lower-cases its texts, and this program lower-cases ASCII only; "
                    "give ids, or a text in ASCII.");
      if (byte >= 'A' && byte <= 'Z') byte = static_cast<char>(byte - 'A' + 'a');
    }
    return lowered;
  }

  Symbols symbols_;
  std::string unknown_;
  std::optional<std::string> end_of_line_, start_of_line_;
  bool lower_case_ = false;
};

// Integers whose meaning another program knows. A text is a sequence of names, or of numbers if there are
// none.
class IdsVocabulary final : public Vocabulary {
 public:
  explicit IdsVocabulary(const json::Value& document)
      : size_(static_cast<std::size_t>(document.at("size").integer(1, max_size))) {
    special_ = read_special(document, static_cast<std::int64_t>(size_));
    const json::Value* names = document.find("names");
    if (!names) return;
    names_.emplace(read_symbols(*names, "names"));
    if (names_->size() != size_) throw json::Value::wrong("it does not have one name per token");
    for (std::size_t id = 0; id < size_; ++id)
      if (split_words(names_->name(id)) != std::vector<std::string>{names_->name(id)})
        throw json::Value::wrong("a name has white space");
  }

  std::string_view kind() const override { return "ids"; }
  std::size_t size() const override { return size_; }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    std::vector<std::int64_t> tokens;
    for (const std::string& word : split_words(text)) {
      tokens.push_back(names_ ? names_->id(word) : number(word));
      if (tokens.back() < 0)
        throw Error(Fault::text, "'" + shown(word) + "', word " + std::to_string(tokens.size()) +
                                     " of the text, is not among the " + (names_ ? "names" : "numbers") +
                                     " of this model's " + std::to_string(size_) +
                                     " tokens; give tokens with blanks between, such as '" +
                                     shown(names_ ? names_->name(0) : "0") + "', or ids.");
    }
    return tokens;
  }

  std::unique_ptr<Decoder> decoder() const override {
    return decoder_of([this, begun = false](std::size_t token, std::string& bytes) mutable {
      if (begun) bytes += ' ';
      begun = true;
      if (names_)
        bytes += names_->name(token);
      else
        bytes += std::to_string(token);  // short enough to need no allocation
    });
  }

 private:
  // The token with this number in decimal; -1 if there is none.
  std::int64_t number(const std::string& word) const {
    if (word.size() > 8 || word.find_first_not_of("0123456789") != std::string::npos) return -1;
    const std::int64_t token = std::stoll(word);
    return token < static_cast<std::int64_t>(size_) ? token : -1;
  }

  std::size_t size_;
  std::optional<Symbols> names_;
};

}  // namespace

std::unique_ptr<Vocabulary> make_symbols(const std::string& kind, const json::Value& document) {
  if (kind == "byte") return std::make_unique<ByteVocabulary>(document);
  if (kind == "char") return std::make_unique<CharVocabulary>(document);
  if (kind == "word") return std::make_unique<WordVocabulary>(document);
  if (kind == "ids") return std::make_unique<IdsVocabulary>(document);
  throw json::Value::wrong("its kind is " + shown(kind));
}

}  // namespace xl_export::detail
