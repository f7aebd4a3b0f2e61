#include "loading.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "element_types.hpp"
#include "onnx_file.hpp"
#include "sampling.hpp"
#include "sha256.hpp"
#include "spec_file.hpp"
#include "utf8.hpp"
#include "vocabularies.hpp"
#ifdef XL_EXPORT_FUSED
#include "xl_export_fused.h"
#endif

namespace xl_export::detail {

Sampler read_sampling(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "sampling.json";
  std::error_code error;
  Sampler sampler;
  if (std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::not_found)
    return sampler;
  const Bytes bytes = read_file(path, max_spec_bytes);
  return naming(path, [&] {
    const json::Value document = json::parse(as_text(bytes));
    if (!document.is(json::Kind::object)) throw json::Value::wrong("an object was expected");
    for (std::size_t at = 0; at < document.keys.size(); ++at) {
      const std::string& name = document.keys[at];
      const json::Value& value = document.items[at];
      if (name == "top_k") {
        if (!value.is(json::Kind::null)) sampler.top_k = value.integer(1, most_top_k);
        continue;
      }
      const auto found = std::find_if(std::begin(settings), std::end(settings),
                                      [&](const Setting& setting) { return setting.name == name; });
      if (found == std::end(settings)) throw json::Value::wrong("it has an unknown setting \"" + name + "\"");
      sampler.*found->value = value.number();
    }
    sampler.verify();
    return sampler;
  });
}

std::unique_ptr<Vocabulary> load_vocabulary(const std::filesystem::path& folder,
                                            const std::map<std::string, Bytes>& contents, std::size_t size) {
  return naming(folder / "vocab.json", [&]() -> std::unique_ptr<Vocabulary> {
    const json::Value document = json::parse(as_text(contents.at("vocab.json")), 4096 + 2 * size);
    const std::string& kind = document.at("kind").string();
    if (kind != "subword") return make_symbols(kind, document);
    const auto beside = contents.find("tokenizer.json");
    if (document.at("library").string() != "tokenizers" || beside == contents.end())
      return make_subwords(document, nullptr);
    if (sha256(beside->second.data(), beside->second.size()) != document.at("sha256").string())
      throw json::Value::wrong("tokenizer.json is not the one that it names");
    return make_subwords(document, &beside->second);
  });
}

namespace {

// The inputs and outputs of the graph, as they follow from the spec.
void add_signatures(Loaded& loaded) {
  const Spec& spec = loaded.spec;
  constexpr auto integers = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, floats = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  loaded.inputs = {{"input_ids", integers, {-1, -1}}, {"position_ids", integers, {-1, -1}}};
  if (!spec.language_model()) {
    loaded.inputs.clear();
    for (const auto* side : {&spec.inputs, &spec.outputs})
      for (const Named& named : *side) {
        std::vector<std::int64_t> sizes(named.timed ? 2 : 1, -1);
        sizes.insert(sizes.end(), named.sizes.begin(), named.sizes.end());
        auto& signatures = side == &spec.inputs ? loaded.inputs : loaded.outputs;
        signatures.push_back({named.name, named.integers ? integers : floats, sizes});
      }
    loaded.inputs.push_back({"position_ids", integers, {-1, -1}});
  } else if (spec.selective) {
    loaded.inputs.push_back({"targets", integers, {-1, -1}});
    loaded.inputs.push_back({"logit_rows", integers, {-1}});
    loaded.outputs = {{"logits", floats, {-1, spec.vocabulary}}, {"log_probs", floats, {-1, -1}}};
  } else {
    loaded.outputs = {{"logits", floats, {-1, -1, spec.vocabulary}}};
  }
  for (const State& state : spec.state) {
    std::vector<std::int64_t> sizes = state.sizes;
    sizes.insert(sizes.begin(), -1);
    const auto type = facts_of(state.dtype).onnx;
    loaded.inputs.push_back({state.name, type, sizes});
    loaded.outputs.push_back({state.present, type, sizes});
  }
}

// A tensor of a graph whose rows or tokens are fixed; any other graph has it as it is.
ort::Signature fixed(ort::Signature signature, const Spec& spec, std::int64_t tokens) {
  if (!spec.fixed_rows && spec.fixed_tokens.empty()) return signature;
  if (spec.fixed_rows) signature.sizes[0] = spec.fixed_rows;
  if (signature.sizes.size() > 1 && signature.sizes[1] < 0) signature.sizes[1] = tokens;
  return signature;
}

// Throws unless the graph has exactly the tensors of the spec, by which buffers are sized.
void verify_signatures(const Loaded& loaded, const OrtSession* session, std::int64_t tokens,
                       const std::filesystem::path& graph) {
  for (const bool input : {true, false}) {
    const auto& promised = input ? loaded.inputs : loaded.outputs;
    std::size_t count = 0;
    ort::check(input ? ort::api().SessionGetInputCount(session, &count)
                     : ort::api().SessionGetOutputCount(session, &count));
    bool same = count == promised.size();
    for (std::size_t index = 0; same && index < count; ++index)
      same = ort::signature(session, index, input) == fixed(promised[index], loaded.spec, tokens);
    if (!same)
      throw Error(Fault::artefact, graph.string() + " has other " + (input ? "inputs" : "outputs") +
                                       " than spec.json promises; export the artefact again.");
  }
}

void refuse_unserved(const Spec& spec, const std::filesystem::path& folder) {
  if (spec.target == "tensorrt")
    throw Error(Fault::artefact, folder.string() +
                                     " was exported for TensorRT; export it without --target "
                                     "tensorrt for ONNX Runtime.");
  const std::string version = ort::version();
  const long major = std::strtol(version.c_str(), nullptr, 10);
  const std::size_t dot = version.find('.');
  const long minor = dot == std::string::npos ? 0 : std::strtol(version.c_str() + dot + 1, nullptr, 10);
  // The oldest release 1.x that computes the graph. Opset 24 has the operator that writes a ring.
  const long oldest = spec.opset >= 24 ? 25 : spec.opset == 23 ? 23 : 21;
  if (major == 1 && minor < oldest)
    throw Error(Fault::option, "the operators of " + spec.form + " memory (opset " +
                                   std::to_string(spec.opset) + ") need ONNX Runtime 1." +
                                   std::to_string(oldest) + " or newer, and this is " + version +
                                   "; link a newer one, or export with --memory shift.");
}

void add_provider(OrtSessionOptions* settings, const Options& options) {
  if (options.provider == Provider::cpu) return;
  const auto cuda = ort::made<OrtCUDAProviderOptionsV2>(ort::api().CreateCUDAProviderOptions);
  const std::string device = std::to_string(options.device);
  // TF32 rounds the factors of products to 10 bits, which the reference answers do not allow.
  const char* keys[] = {"device_id", "use_tf32"};
  const char* values[] = {device.c_str(), "0"};
  ort::check(ort::api().UpdateCUDAProviderOptions(cuda.get(), keys, values, 2));
  ort::check(ort::api().SessionOptionsAppendExecutionProvider_CUDA_V2(settings, cuda.get()));
}

// Whether graph and weights are one file of ONNX Runtime's own format.
bool is_ort(const Spec& spec) {
  return spec.storage == "ort" || spec.storage == "fused-ort";
}

// Whether this program has the fused operator for this processor.
bool has_fused() {
#ifdef XL_EXPORT_FUSED
  return xl_export_fused_variant() != nullptr;
#else
  return false;
#endif
}

void register_fused(OrtSessionOptions* settings, const Options& options) {
#ifdef XL_EXPORT_FUSED
  if (options.fused_library.empty()) return ort::check(xl_export_fused_register(settings, OrtGetApiBase()));
#endif
  try {
    ort::check(ort::api().RegisterCustomOpsLibrary_V2(settings, options.fused_library.c_str()));
  } catch (const ort::Failure& failure) {
    throw Error(Fault::option, "the fused operator " + options.fused_library + " could not be loaded (" +
                                   failure.what() +
                                   "); leave it out, or build it again with `xl-export fused-kernel`.");
  }
}

ort::Owned<OrtSession> make_session(const Bytes& graph, const Bytes* weights, const Options& options,
                                    const std::filesystem::path& folder, const Spec& spec, bool fused,
                                    bool single = false) {
  const OrtEnv* environment = ort::environment();
  const auto settings = ort::made<OrtSessionOptions>(ort::api().CreateSessionOptions);
  ort::check(ort::api().SetSessionLogSeverityLevel(settings.get(), ORT_LOGGING_LEVEL_FATAL));
  ort::check(ort::api().SetIntraOpNumThreads(settings.get(), options.threads));
  // As in Python: what ONNX Runtime would do beyond this makes opening and segments slower.
  if (spec.exporter == "graph" && spec.target == "onnxruntime" && options.provider == Provider::cpu)
    ort::check(ort::api().SetSessionGraphOptimizationLevel(settings.get(), ORT_ENABLE_BASIC));
  // Microseconds that a thread waits awake for work: by default so long that it slows other processes, and
  // they slow a step. Nodes that compute a whole layer stay awake until the next token, as in Python.
  static const std::string layer = "RingRelativeLayer";
  const bool in_layers =
      fused && std::search(graph.begin(), graph.end(), layer.begin(), layer.end()) != graph.end();
  ort::check(ort::api().AddSessionConfigEntry(settings.get(), "session.intra_op.spin_duration_us",
                                              in_layers ? "200" : "50"));
  if (fused) register_fused(settings.get(), options);
  try {
    add_provider(settings.get(), options);
  } catch (const ort::Failure& failure) {
    throw Error(Fault::option, std::string("CUDA cannot be used (") + failure.what() +
                                   "); link ONNX Runtime's library for GPUs, or use the CPU.");
  }
  // Otherwise ONNX Runtime would tell the format from the first bytes.
  ort::check(ort::api().AddSessionConfigEntry(settings.get(), "session.load_model_format",
                                              is_ort(spec) ? "ORT" : "ONNX"));
  // Copies of the matrices in another order help steps of one token and one row least.
  if (single) ort::check(ort::api().AddSessionConfigEntry(settings.get(), "session.disable_prepacking", "1"));
  if (weights) {
    const char* name = "weights.bin";
    // The interface takes pointers that are not const, but ONNX Runtime does not write through them. With
    // this option the CPU provider uses the bytes in place; older releases ignore it and copy them.
    if (options.provider == Provider::cpu)
      ort::check(ort::api().AddSessionConfigEntry(
          settings.get(), "session.use_external_initializer_file_buffers_directly", "1"));
    auto* content = const_cast<char*>(reinterpret_cast<const char*>(weights->data()));
    const std::size_t size = weights->size();
    // A small graph holds all its weights itself. ONNX Runtime refuses the null pointer of an empty vector.
    char nothing = 0;
    if (size == 0) content = &nothing;
    ort::check(
        ort::api().AddExternalInitializersFromFilesInMemory(settings.get(), &name, &content, &size, 1));
  }
  // Where it would look for other tensors. `OnnxFile` has made sure that there are none.
  ort::check(ort::api().AddSessionConfigEntry(
      settings.get(), "session.model_external_initializers_file_folder_path", folder.string().c_str()));
  return ort::made<OrtSession>(ort::api().CreateSessionFromArray, environment,
                               static_cast<const void*>(graph.data()), graph.size(), settings.get());
}

}  // namespace

Loaded load(const std::filesystem::path& folder, const Options& options) {
  Loaded loaded;
  loaded.folder = folder.string();
  loaded.spec = read_spec(folder, options.public_key);
  const std::string& identity = loaded.spec.identity;
  if (options.expected_identity && *options.expected_identity != identity)
    throw Error(Fault::artefact, (folder / "spec.json").string() + " has the identity " + identity +
                                     ", expected " + *options.expected_identity +
                                     "; copy the expected one there, or change the expected identity.");
  loaded.sampler = read_sampling(folder);
  const Spec& spec = loaded.spec;
  refuse_unserved(spec, folder);
  const bool only_fused = spec.storage == "fused-ort", served = only_fused || spec.has("fused.onnx");
  if (options.fused_library.empty()) {
    loaded.fused = served && options.fused && options.provider == Provider::cpu && has_fused();
    if (only_fused && !loaded.fused)
      throw Error(Fault::option,
                  folder.string() +
                      " needs the fused operator on the CPU; build the program with "
                      "-DXL_EXPORT_FUSED=ON, or give the operator's library as fused_library.");
  } else if (!served) {
    throw Error(Fault::option, folder.string() +
                                   " has no graph for the fused operator, which does not serve its "
                                   "model; leave fused_library out.");
  } else {
    loaded.fused = true;
  }
  if (options.threads < 0 || options.threads > 4096)
    throw Error(Fault::option, "threads is " + std::to_string(options.threads) + "; expected 0 to 4096.");
  const std::string graph_name = loaded.fused && !only_fused ? "fused.onnx" : spec.graph_file();
  std::set<std::string> kept = {graph_name, "weights.bin", "vocab.json", "tokenizer.json"};
  for (const std::int64_t tokens : spec.fixed_tokens) kept.insert(spec.graph_of(tokens));
  std::map<std::string, Bytes> contents;
  for (const auto& [name, facts] : spec.files) {
    Bytes content = read_verified(folder / name, facts);
    if (kept.count(name)) contents[name] = std::move(content);
  }
  if (spec.language_model())
    loaded.vocabulary = load_vocabulary(folder, contents, static_cast<std::size_t>(spec.vocabulary));
  if (loaded.vocabulary && static_cast<std::int64_t>(loaded.vocabulary->size()) != spec.vocabulary)
    throw Error(Fault::artefact, (folder / "vocab.json").string() + " has " +
                                     std::to_string(loaded.vocabulary->size()) + " symbols and the model " +
                                     std::to_string(spec.vocabulary) + "; export the artefact again.");
  const std::filesystem::path graph = folder / graph_name;
  const bool outside = spec.storage == "external";
  if (is_ort(spec))
    OnnxFile::verify_ort(as_text(contents[graph_name]), graph.string());
  else
    OnnxFile::verify(as_text(contents[graph_name]), graph.string(), outside ? "weights.bin" : "");
  add_signatures(loaded);
  for (const ort::Signature& input : loaded.inputs) loaded.input_names.push_back(input.name.c_str());
  for (const ort::Signature& output : loaded.outputs) loaded.output_names.push_back(output.name.c_str());
  if (outside) loaded.weights = std::move(contents["weights.bin"]);
  try {
    loaded.session = make_session(contents[graph_name], outside ? &loaded.weights : nullptr, options, folder,
                                  spec, loaded.fused);
    verify_signatures(loaded, loaded.session.get(), spec.segment, graph);
    for (const std::int64_t tokens : spec.fixed_tokens) {
      if (tokens == spec.segment) continue;
      const std::string name = spec.graph_of(tokens);
      OnnxFile::verify(as_text(contents[name]), (folder / name).string(), "weights.bin");
      auto& session = loaded.shorter[tokens];
      session = make_session(contents[name], &loaded.weights, options, folder, spec, false,
                             tokens == 1 && spec.fixed_rows == 1 && spec.precision == "fp32");
      verify_signatures(loaded, session.get(), tokens, folder / name);
    }
    if (options.provider != Provider::cpu) loaded.weights = Bytes();
  } catch (const ort::Failure& failure) {
    throw Error(Fault::artefact, graph.string() + " could not be loaded by ONNX Runtime " + ort::version() +
                                     " (" + failure.what() + "); export the artefact again.");
  }
  return loaded;
}

}  // namespace xl_export::detail
