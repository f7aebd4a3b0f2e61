// Loads the graph of an artefact into ONNX Runtime, from the very bytes that were verified.
#ifndef XL_EXPORT_LOADING_HPP
#define XL_EXPORT_LOADING_HPP

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "file.hpp"
#include "include/xl_export/sampler.hpp"
#include "include/xl_export/session.hpp"
#include "include/xl_export/vocabulary.hpp"
#include "ort.hpp"

namespace xl_export::detail {

struct Loaded {
  std::string folder;
  Spec spec;
  std::unique_ptr<Vocabulary> vocabulary;  // null of a step that is no language model
  Sampler sampler;                         // of sampling.json
  bool fused = false;
  Bytes weights;  // a session on the CPU reads them in place, so they are destroyed after it
  ort::Owned<OrtSession> session;
  std::map<std::int64_t, ort::Owned<OrtSession>> shorter;  // the other graphs of fixed sizes, by their tokens
  std::vector<ort::Signature> inputs, outputs;             // in the order in which a step gives them
  std::vector<const char*> input_names, output_names;
};

// How the artefact in a folder recommends to draw tokens: its sampling.json, if it has one. Anything else by
// that name is refused, such as a link to nothing.
Sampler read_sampling(const std::filesystem::path& folder);

// The vocabulary of an artefact. contents: the verified files, by name. size: how many tokens the model has.
std::unique_ptr<Vocabulary> load_vocabulary(const std::filesystem::path& folder,
                                            const std::map<std::string, Bytes>& contents, std::size_t size);

Loaded load(const std::filesystem::path& folder, const Options& options);

}  // namespace xl_export::detail

#endif
