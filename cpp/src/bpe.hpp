// Byte pair encoding of a `tokenizer.json` of the library `tokenizers`, whose fields are that library's: which
// of the two kinds of subwords that are computed here it is, or why it is neither; and the merges of a word,
// in the order of their rank.
#ifndef XL_EXPORT_BPE_HPP
#define XL_EXPORT_BPE_HPP

#include <cstdint>
#include <queue>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "json.hpp"
#include "limits.hpp"
#include "utf8.hpp"

namespace xl_export::detail {

struct SubwordKind {
  const json::Value* model = nullptr;
  bool byte_level = false;  // BPE over bytes, as of GPT-2; otherwise over characters
  std::string unserved;     // why it is neither; empty if it is one of them
};

inline bool is_text(const json::Value* value, std::string_view text) {
  return value && value->is(json::Kind::string) && value->text == text;
}

inline bool is_type(const json::Value* part, std::string_view type) {
  return part && part->is(json::Kind::object) && is_text(part->find("type"), type);
}

// Whether an option has no effect: it is not there, null, false or an empty string.
inline bool is_off(const json::Value& object, const char* name) {
  const json::Value* found = object.find(name);
  return !found || found->is(json::Kind::null) || (found->is(json::Kind::boolean) && !found->boolean()) ||
         (found->is(json::Kind::string) && found->text.empty());
}

inline SubwordKind subword_kind(const json::Value& file) {
  const json::Value& model = file.at("model");
  const auto unserved = [&](const std::string& why) { return SubwordKind{&model, false, why}; };
  if (!is_type(&model, "BPE")) return unserved("its model is not BPE");
  for (const char* option : {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                             "byte_fallback", "ignore_merges"})
    if (!is_off(model, option)) return unserved(std::string("its BPE has ") + option);
  if (!is_off(file, "normalizer")) return unserved("it has a normalizer");
  for (const json::Value& token : file.at("added_tokens").list())
    for (const char* option : {"single_word", "lstrip", "rstrip", "normalized"})
      if (!is_off(token, option))
        return unserved("its added token " + shown(token.at("content").string()) + " is " + option);
  const json::Value *before = file.find("pre_tokenizer"), *after = file.find("decoder");
  if (is_type(before, "ByteLevel") && is_type(after, "ByteLevel")) {
    const json::Value* expression = before->find("use_regex");
    if (!is_off(*before, "add_prefix_space")) return unserved("it puts a blank in front of a text");
    if (expression && !expression->boolean()) return unserved("it does not split words");
    return {&model, true, ""};
  }
  const std::string other = "it splits words in another way";
  if (!is_type(before, "Sequence") || !is_type(after, "Metaspace")) return unserved(other);
  const auto& steps = before->at("pretokenizers").list();
  if (steps.size() != 2 || !is_type(&steps[0], "Split") || !is_type(&steps[1], "Metaspace"))
    return unserved(other);
  const json::Value* newline = steps[0].at("pattern").find("String");
  if (!newline || newline->string() != "\n" || steps[0].at("behavior").string() != "Isolated" ||
      !is_off(steps[0], "invert"))
    return unserved("it splits lines in another way");
  for (const json::Value* words : {&steps[1], after})
    if (!is_text(words->find("replacement"), "\xe2\x96\x81") ||
        !is_text(words->find("prepend_scheme"), "never") || is_off(*words, "split"))
      return unserved(other);
  return {&model, false, ""};
}

struct AddedToken {
  std::string content;
  std::int64_t id;
  bool special;  // no text becomes this token
};

inline std::vector<AddedToken> added_tokens(const json::Value& file) {
  std::vector<AddedToken> tokens;
  for (const json::Value& token : file.at("added_tokens").list()) {
    tokens.push_back({token.at("content").string(), token.at("id").integer(0, max_size),
                      !is_off(token, "special")});
    if (tokens.back().content.empty()) throw json::Value::wrong("it has an added token without text");
  }
  return tokens;
}

class BytePairs {
 public:
  // `model` of a tokenizer.json. Its tokens are added to `texts` by id.
  BytePairs(const json::Value& model, std::unordered_map<std::int64_t, std::string>& texts) {
    const json::Value& vocabulary = model.at("vocab");
    if (!vocabulary.is(json::Kind::object)) throw json::Value::wrong("its BPE has no vocabulary");
    for (std::size_t index = 0; index < vocabulary.keys.size(); ++index) {
      const std::int64_t id = vocabulary.items[index].integer(0, max_size);
      ids_[vocabulary.keys[index]] = id;
      texts[id] = vocabulary.keys[index];
    }
    const json::Value* unknown = model.find("unk_token");
    if (unknown && !unknown->is(json::Kind::null)) unknown_ = id(unknown->string());
    std::int64_t rank = 0;
    for (const json::Value& merge : model.at("merges").list()) {
      std::string left, right;
      if (merge.is(json::Kind::string)) {  // older files write both halves in one string
        const std::size_t blank = merge.text.find(' ');
        if (blank == std::string::npos) throw json::Value::wrong("one of its merges has no blank");
        left = merge.text.substr(0, blank), right = merge.text.substr(blank + 1);
      } else {
        if (merge.list().size() != 2) throw json::Value::wrong("one of its merges is no pair");
        left = merge.items[0].string(), right = merge.items[1].string();
      }
      const std::int64_t a = id(left), b = id(right), whole = id(left + right);
      if (a < 0 || b < 0 || whole < 0) throw json::Value::wrong("one of its merges is of no tokens");
      merges_[key(a, b)] = {rank++, whole};
    }
  }

  std::int64_t id(const std::string& token) const {  // -1 for none
    const auto found = ids_.find(token);
    return found == ids_.end() ? -1 : found->second;
  }

  // Adds the tokens of a word. The merge of the lowest rank comes first, of equals the leftmost. A queue of
  // candidates keeps the time of a very long word within its length times the logarithm.
  void encode(const std::string& word, std::vector<std::int64_t>& tokens) const {
    std::vector<Part> parts;
    for (std::size_t at = 0; at < word.size();) {
      const std::size_t length = first_character(std::string_view(word).substr(at)).length;
      const std::int64_t known = id(word.substr(at, length));
      at += length;
      const std::int64_t token = known < 0 ? unknown_ : known;
      if (token < 0) continue;  // without an unknown token, the library leaves out what it does not know
      const auto number = static_cast<std::int64_t>(parts.size());
      parts.push_back({token, number - 1, number + 1, true});
    }
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto offer = [&](std::int64_t at) {
      const std::int64_t next = at < 0 ? -1 : parts[static_cast<std::size_t>(at)].next;
      if (next < 0 || next >= static_cast<std::int64_t>(parts.size())) return;
      const std::uint64_t pair =
          key(parts[static_cast<std::size_t>(at)].token, parts[static_cast<std::size_t>(next)].token);
      const auto found = merges_.find(pair);
      if (found != merges_.end()) queue.push({found->second.rank, at, pair, found->second.whole});
    };
    for (std::size_t at = 0; at + 1 < parts.size(); ++at) offer(static_cast<std::int64_t>(at));
    while (!queue.empty()) {
      const Candidate best = queue.top();
      queue.pop();
      Part& left = parts[static_cast<std::size_t>(best.at)];
      if (!left.there || left.next >= static_cast<std::int64_t>(parts.size())) continue;
      Part& right = parts[static_cast<std::size_t>(left.next)];
      if (key(left.token, right.token) != best.pair) continue;  // one of them was merged since
      left.token = best.whole;
      right.there = false;
      left.next = right.next;
      if (left.next < static_cast<std::int64_t>(parts.size()))
        parts[static_cast<std::size_t>(left.next)].previous = best.at;
      offer(left.previous);
      offer(best.at);
    }
    for (const Part& part : parts)
      if (part.there) tokens.push_back(part.token);
  }

 private:
  struct Part {
    std::int64_t token, previous, next;
    bool there;
  };
  struct Merge {
    std::int64_t rank, whole;
  };
  struct Candidate {
    std::int64_t rank, at;
    std::uint64_t pair;
    std::int64_t whole;

    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };

  static std::uint64_t key(std::int64_t left, std::int64_t right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint64_t>(right);
  }

  std::unordered_map<std::string, std::int64_t> ids_;
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::int64_t unknown_ = -1;
};

}  // namespace xl_export::detail

#endif
