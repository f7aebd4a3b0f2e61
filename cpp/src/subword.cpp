// Subwords of a `tokenizer.json` of the library `tokenizers`: byte pair encoding over bytes (as of GPT-2),
// and over characters with words that begin with "▁", as `xl-export prepare vocab --kind bpe` learns them.
// Every other kind accepts only ids, and says so.
#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <utility>

#include "bpe.hpp"
#include "limits.hpp"
#include "unicode_classes.hpp"
#include "utf8.hpp"
#include "vocabularies.hpp"

namespace xl_export::detail {
namespace {

// The characters of a class that is written down as lengths of runs, outside and inside by turns.
class CharacterClass {
 public:
  template <std::size_t size>
  explicit CharacterClass(const std::uint32_t (&runs)[size]) : edges_(size) {
    std::partial_sum(std::begin(runs), std::end(runs), edges_.begin());
  }

  bool has(char32_t code) const {
    const auto found = std::upper_bound(edges_.begin(), edges_.end(), code);
    return found != edges_.end() && (found - edges_.begin()) % 2 == 1;
  }

 private:
  std::vector<std::uint32_t> edges_;  // where the runs end
};

bool is_letter(char32_t code) {
  static const CharacterClass letters(letter_runs);
  return letters.has(code);
}
bool is_number(char32_t code) {
  static const CharacterClass numbers(number_runs);
  return numbers.has(code);
}
// White space in regular expressions of the library; Python's has four control characters more.
bool is_blank(char32_t code) {
  return is_space(code) && !(code >= 0x1c && code <= 0x1f);
}

// The end of the word that begins at a character, by GPT-2's expression:
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t word_end(const std::vector<char32_t>& text, std::size_t at) {
  const auto is = [&](std::size_t index, char32_t code) {
    return index < text.size() && text[index] == code;
  };
  if (is(at, '\'')) {
    for (const char32_t letter : {U's', U't', U'm', U'd'})
      if (is(at + 1, letter)) return at + 2;
    if ((is(at + 1, 'r') || is(at + 1, 'v')) && is(at + 2, 'e')) return at + 3;
    if (is(at + 1, 'l') && is(at + 2, 'l')) return at + 3;
  }
  const auto run = [&](std::size_t from, auto member) {
    while (from < text.size() && member(text[from])) ++from;
    return from;
  };
  const std::size_t first = is(at, ' ') ? at + 1 : at;
  const auto other = [](char32_t code) { return !is_blank(code) && !is_letter(code) && !is_number(code); };
  for (const std::size_t end : {run(first, is_letter), run(first, is_number), run(first, other)})
    if (end > first) return end;
  const std::size_t end = run(at, is_blank);
  // The last blank of a run belongs to the word that follows.
  return end < text.size() && end - at > 1 ? end - 1 : end;
}

// What byte-level vocabularies write for each byte: printable bytes stand for themselves, others for
// characters from U+0100 on.
const std::array<char32_t, 256>& byte_characters() {
  static const std::array<char32_t, 256> table = [] {
    std::array<char32_t, 256> made{};
    char32_t next = 256;
    for (char32_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
      made[byte] = printable ? byte : next++;
    }
    return made;
  }();
  return table;
}

class SubwordVocabulary final : public Vocabulary {
 public:
  SubwordVocabulary(const json::Value& document, const Bytes* tokenizer)
      : size_(static_cast<std::size_t>(document.at("size").integer(1, max_size))) {
    special_ = read_special(document, static_cast<std::int64_t>(size_));
    if (!tokenizer) {
      unserved_ = document.at("library").string() + " is not built in";
      return;
    }
    // Other releases of the library write other fields. Ids need none of them.
    try {
      read(json::parse(as_text(*tokenizer), (std::size_t{1} << 16) + 16 * size_));
    } catch (const Error& error) {
      unserved_ = std::string("of its tokenizer.json ") + error.what();
    }
  }

  std::string_view kind() const override { return "subword"; }
  std::size_t size() const override { return size_; }

  std::vector<std::int64_t> encode(std::string_view text) const override {
    refuse_unserved();
    refuse_nul(text);
    std::vector<std::int64_t> tokens;
    for (const std::string_view piece : pieces(text)) encode_piece(piece, tokens);
    for (const std::int64_t token : tokens)
      if (static_cast<std::size_t>(token) >= size_)
        throw Error(Fault::text, "the text has the token " + std::to_string(token) + ", and the model has " +
                                     std::to_string(size_) +
                                     " tokens; its tokenizer.json is of another model.");
    return tokens;
  }

  std::unique_ptr<Decoder> decoder() const override {
    refuse_unserved();
    return decoder_of([this](std::size_t token, std::string& bytes) {
      const auto found = bytes_.find(static_cast<std::int64_t>(token));
      if (found != bytes_.end()) bytes += found->second;
    });
  }

 private:
  using Ids = std::vector<std::int64_t>;

  // Reads a tokenizer.json, or says why its texts are not served.
  void read(const json::Value& file) {
    const SubwordKind kind = subword_kind(file);
    unserved_ = kind.unserved;
    if (!unserved_.empty()) return;
    byte_level_ = kind.byte_level;
    pairs_.emplace(*kind.model, bytes_);
    for (const AddedToken& token : added_tokens(file)) {
      bytes_[token.id] = token.content;
      if (!token.special) words_.push_back(token);
    }
    for (auto& [id, bytes] : bytes_) bytes = bytes_of(bytes);
    // Of two tokens that begin at one place the longer is taken.
    std::sort(words_.begin(), words_.end(),
              [](const auto& a, const auto& b) { return a.content.size() > b.content.size(); });
  }

  void refuse_unserved() const {
    if (!unserved_.empty())
      throw Error(Fault::text,
                  "the vocabulary of subwords is of a kind that this program does not compute (" + unserved_ +
                      "); give ids, which the library of the vocabulary makes.");
  }

  // A long text in pieces, at the places where the Python package cuts it: at the end of a line with no blank
  // behind it, or in front of a blank, or anywhere.
  static std::vector<std::string_view> pieces(std::string_view text) {
    constexpr std::size_t longest = 1 << 18;  // characters
    std::vector<std::string_view> parts;
    const std::vector<char32_t> codes = characters(text);
    std::size_t at = 0, byte = 0;
    while (codes.size() - at > longest) {
      std::size_t line = 0, blank = 0;
      for (std::size_t index = at + 1; index < at + longest; ++index) {
        if (codes[index] == '\n' && index + 1 < at + longest && !is_space(codes[index + 1])) line = index + 1;
        if (codes[index] == ' ') blank = index;
      }
      const std::size_t end = line ? line : blank ? blank : at + longest;
      std::size_t length = 0;
      for (; at < end; ++at) length += first_character(text.substr(byte + length)).length;
      parts.push_back(text.substr(byte, length));
      byte += length;
    }
    parts.push_back(text.substr(byte));
    return parts;
  }

  // Text that looks like an added word becomes its token; what is between is encoded.
  void encode_piece(std::string_view text, Ids& tokens) const {
    std::size_t from = 0;
    for (std::size_t at = 0; at < text.size();) {
      const auto found = std::find_if(words_.begin(), words_.end(), [&](const auto& token) {
        return text.compare(at, token.content.size(), token.content) == 0;
      });
      if (found == words_.end()) {
        ++at;
        continue;
      }
      encode_plain(text.substr(from, at - from), tokens);
      tokens.push_back(found->id);
      from = at += found->content.size();
    }
    encode_plain(text.substr(from), tokens);
  }

  void encode_plain(std::string_view text, Ids& tokens) const {
    const std::vector<char32_t> codes = characters(text);
    std::string word;
    if (byte_level_) {
      for (std::size_t at = 0, end = 0; at < codes.size(); at = end) {
        end = word_end(codes, at);
        std::string bytes;
        for (std::size_t index = at; index < end; ++index) append_utf8(bytes, codes[index]);
        word.clear();
        for (const char byte : bytes) append_utf8(word, byte_characters()[static_cast<unsigned char>(byte)]);
        pairs_->encode(word, tokens);
      }
      return;
    }
    const auto finish = [&] {
      if (!word.empty()) pairs_->encode(word, tokens);
      word.clear();
    };
    constexpr char32_t blank = 0x2581;  // "▁", which stands for a blank and begins a word
    for (const char32_t code : codes) {
      if (code == '\n' || code == ' ' || code == blank) finish();
      append_utf8(word, code == ' ' ? blank : code);
      if (code == '\n') finish();
    }
    finish();
  }

  // The bytes that a token adds to a text, as the library decodes it.
  std::string bytes_of(const std::string& token) const {
    std::string bytes;
    for (const char32_t code : characters(token)) {
      if (!byte_level_) {
        append_utf8(bytes, code == 0x2581 ? U' ' : code);
        continue;
      }
      const auto& table = byte_characters();
      const auto byte = std::find(table.begin(), table.end(), code);
      if (byte == table.end()) return token;  // an added token, which stands for itself
      bytes += static_cast<char>(byte - table.begin());
    }
    return bytes;
  }

  std::size_t size_;
  std::string unserved_;  // why no text is encoded here; empty if it is
  bool byte_level_ = false;
  std::optional<BytePairs> pairs_;
  std::vector<AddedToken> words_;                        // the longest first
  std::unordered_map<std::int64_t, std::string> bytes_;  // of each token
};

}  // namespace

std::unique_ptr<Vocabulary> make_subwords(const json::Value& document, const Bytes* tokenizer) {
  return std::make_unique<SubwordVocabulary>(document, tokenizer);
}

}  // namespace xl_export::detail
