// What a `tokenizer.json` of the library `tokenizers` says about itself: which of the two kinds of subwords
// that this library computes it is, or why it is neither. The fields are those of that library.
#ifndef XL_EXPORT_TOKENIZER_JSON_HPP
#define XL_EXPORT_TOKENIZER_JSON_HPP

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../json.hpp"

namespace xl_export::detail {

struct SubwordKind {
  const json::Value* model = nullptr;
  bool byte_level = false;  // BPE over bytes, as of GPT-2; otherwise over characters
  std::string unserved;     // why it is neither; empty where it is one of them
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

// The tokens that stand for a text as it is, with their ids.
inline std::vector<std::pair<std::string, std::int64_t>> added_tokens(const json::Value& file) {
  std::vector<std::pair<std::string, std::int64_t>> tokens;
  for (const json::Value& token : file.at("added_tokens").list()) {
    tokens.emplace_back(token.at("content").string(), token.at("id").integer(0, max_size));
    if (tokens.back().first.empty()) throw json::Value::wrong("it has an added token without text");
  }
  return tokens;
}

}  // namespace xl_export::detail

#endif
