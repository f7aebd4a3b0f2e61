// Opens the vocabulary of an artefact, whatever its kind.
#ifndef XL_EXPORT_VOCABULARIES_HPP
#define XL_EXPORT_VOCABULARIES_HPP

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "../file.hpp"
#include "../spec.hpp"
#include "subword.hpp"
#include "symbols.hpp"

namespace xl_export::detail {

// The vocabulary of an artefact. contents: the verified files, by name. size: how many tokens the model has.
inline std::unique_ptr<Vocabulary> load_vocabulary(const std::filesystem::path& folder,
                                                   const std::map<std::string, Bytes>& contents,
                                                   std::size_t size) {
  return naming(folder / "vocab.json", [&]() -> std::unique_ptr<Vocabulary> {
    const json::Value document = json::parse(as_text(contents.at("vocab.json")), 4096 + 2 * size);
    const std::string& kind = document.at("kind").string();
    if (kind == "byte") return std::make_unique<ByteVocabulary>(document);
    if (kind == "char") return std::make_unique<CharVocabulary>(document);
    if (kind == "word") return std::make_unique<WordVocabulary>(document);
    if (kind == "ids") return std::make_unique<IdsVocabulary>(document);
    if (kind != "subword") throw json::Value::wrong("its kind is " + shown(kind));
    const auto beside = contents.find("tokenizer.json");
    if (document.at("library").string() != "tokenizers" || beside == contents.end())
      return std::make_unique<SubwordVocabulary>(document, nullptr);
    if (sha256(beside->second.data(), beside->second.size()) != document.at("sha256").string())
      throw json::Value::wrong("tokenizer.json is not the one that it names");
    return std::make_unique<SubwordVocabulary>(document, &beside->second);
  });
}

}  // namespace xl_export::detail

#endif
