// `spec.json`: what a runtime must know about an artefact, and the proof that the artefact is intact. Every
// field is described in docs/reference/format.md.
#ifndef XL_EXPORT_SPEC_HPP
#define XL_EXPORT_SPEC_HPP

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "file.hpp"
#include "json.hpp"

namespace xl_export {

enum class ElementType { float32, float16, int8 };

// One memory tensor: the graph reads `name` and returns `present`, of the same type and shape.
struct State {
  std::string name, present;
  ElementType dtype = ElementType::float32;
  std::vector<std::int64_t> sizes;  // of one row; the axis of the batch comes before them

  std::size_t row_bytes() const {
    std::size_t bytes = dtype == ElementType::int8 ? 1 : dtype == ElementType::float16 ? 2 : 4;
    for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    return bytes;
  }
};

// An input or output of a step that is no language model, and is not memory.
struct Named {
  std::string name;
  bool integers = false;            // int64 numbers; otherwise float32
  std::int64_t ids = 0;             // of an input of ids: how many there are
  bool timed = false;               // whether it has a value for each token, or one for each row
  std::vector<std::int64_t> sizes;  // of one value

  std::size_t value_size() const {
    std::size_t size = 1;
    for (const std::int64_t each : sizes) size *= static_cast<std::size_t>(each);
    return size;
  }
};

// The contract of one artefact, as far as a loop needs it.
struct Spec {
  std::string identity;  // the SHA-256 of spec.json, by which saved streams name the artefact
  std::string form;      // of the memory: ring, shift, hidden or own
  std::string precision;  // of the weights
  std::string target;    // onnxruntime, tensorrt or web
  std::string storage;   // where graph and weights are: external, single-file or ort
  double tolerance = 0, mean_tolerance = 0;  // of `check`, in nats
  std::int64_t vocabulary = 0;  // V, the number of tokens; 0 of a step that is no language model
  std::int64_t segment = 0;     // the most tokens of one step
  std::int64_t memory = 0;      // the tokens that are remembered
  std::int64_t opset = 0;       // of the graph's standard operators
  bool selective = false;       // the graph computes only the distributions that are asked for
  std::vector<State> state;
  std::vector<Named> inputs, outputs;  // of a step that is no language model, without the positions
  std::set<std::string> without;       // the promises that the artefact does not keep
  std::int64_t fixed_rows = 0;         // of every step, if the graph has fixed sizes; 0 for any
  std::set<std::int64_t> fixed_tokens;  // then, of several graphs: the tokens of each; empty for `segment`
  std::map<std::string, detail::FileFacts> files;

  bool has(const std::string& file) const { return files.count(file) != 0; }

  bool language_model() const { return vocabulary > 0; }

  // Whether weights or memory are stored in fewer bits than they were trained in.
  bool lossy() const {
    return precision != "fp32" || std::any_of(state.begin(), state.end(), [](const State& each) {
             return each.dtype != ElementType::float32;
           });
  }

  // The file with the graph of standard operators.
  const char* graph_file() const { return storage == "ort" ? "step.ort" : "step.onnx"; }

  // The file of the graph of fixed sizes with so many tokens.
  std::string graph_of(std::int64_t tokens) const {
    return tokens == segment ? graph_file() : "step." + std::to_string(tokens) + ".onnx";
  }

  // The tokens that one run of a graph computes of a step: the largest of several graphs that fits.
  std::int64_t tokens_at_once(std::int64_t length) const {
    return fixed_tokens.empty() ? length : *std::prev(fixed_tokens.upper_bound(length));
  }

  // Whether a memory tensor holds the scales of the tensor of bytes before it.
  bool is_scale(std::size_t index) const {
    return index > 0 && state[index - 1].dtype == ElementType::int8 &&
           state[index].name == state[index - 1].name + "_scale";
  }

  // Whether past and present of the memory are one buffer. A graph for WebGPU makes a ring anew in each step.
  bool ring() const { return form == "ring"; }
  bool in_place() const { return ring() && target != "web"; }

  std::size_t row_bytes() const {
    std::size_t bytes = 0;
    for (const State& tensor : state) bytes += tensor.row_bytes();
    return bytes;
  }
};

namespace detail {

constexpr std::uint64_t max_spec_bytes = 1 << 24;
constexpr std::int64_t max_layers = 4096;
constexpr std::size_t max_state = 4 * max_layers;  // memory tensors

inline bool is_plain_name(const std::string& name) {
  const auto word = [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  };
  if (name.empty() || name.size() > 100 || !word(name[0])) return false;
  return std::all_of(name.begin(), name.end(), [&](char c) { return word(c) || c == '.' || c == '-'; });
}

inline State parse_state(const json::Value& entry) {
  State state;
  state.name = entry.at("name").string();
  state.present = entry.at("present").string();
  const std::string& dtype = entry.at("dtype").string();
  if (dtype == "float16") state.dtype = ElementType::float16;
  else if (dtype == "int8") state.dtype = ElementType::int8;
  else if (dtype != "float32") throw json::Value::wrong("a memory tensor is of type " + shown(dtype));
  const auto& shape = entry.at("shape").list();
  if (shape.empty() || shape.size() > 9 || shape[0].string() != "batch")
    throw json::Value::wrong("the shape of a memory tensor does not begin with its batch");
  for (std::size_t axis = 1; axis < shape.size(); ++axis)
    state.sizes.push_back(shape[axis].integer(0, max_size));
  // One row of one tensor stays below 2^40 bytes, also without the sizes that are 0, so no product of sizes
  // overflows in any order.
  double bytes = 4;
  for (const std::int64_t size : state.sizes) bytes *= static_cast<double>(std::max<std::int64_t>(1, size));
  if (bytes > 1e12) throw json::Value::wrong("a memory tensor has more than 10^12 bytes");
  return state;
}

inline Named parse_named(const json::Value& entry) {
  Named named;
  named.name = entry.at("name").string();
  const std::string& dtype = entry.at("dtype").string();
  named.integers = dtype == "int64";
  if (!named.integers && dtype != "float32") throw json::Value::wrong("a tensor is of type " + shown(dtype));
  if (const json::Value* ids = entry.find("ids")) named.ids = ids->integer(1, max_size);
  const auto& shape = entry.at("shape").list();
  if (shape.empty() || shape.size() > 8 || shape[0].string() != "batch")
    throw json::Value::wrong("the shape of " + shown(named.name) + " does not begin with its batch");
  named.timed = shape.size() > 1 && shape[1].is(json::Kind::string) && shape[1].string() == "tokens";
  double numbers = 1;
  for (std::size_t axis = named.timed ? 2 : 1; axis < shape.size(); ++axis) {
    named.sizes.push_back(shape[axis].integer(1, max_size));
    numbers *= static_cast<double>(named.sizes.back());
  }
  if (numbers > 1e9)
    throw json::Value::wrong("a value of " + shown(named.name) + " has more than 10^9 numbers");
  return named;
}

// The inputs and outputs of a step that is no language model.
inline void add_named(Spec& spec, const json::Value& document) {
  std::set<std::string> names, after;
  for (const State& state : spec.state) after.insert(state.present);
  for (const json::Value& entry : document.at("inputs").list())
    if (!entry.find("present")) spec.inputs.push_back(parse_named(entry));
  if (spec.inputs.size() < 2 || spec.inputs.back().name != "position_ids")
    throw json::Value::wrong("its step has no inputs, or position_ids is not the last of them");
  spec.inputs.pop_back();
  for (const json::Value& entry : document.at("outputs").list())
    if (!after.count(entry.at("name").string())) spec.outputs.push_back(parse_named(entry));
  if (spec.outputs.empty()) throw json::Value::wrong("its step has no outputs");
  bool timed = false;
  for (const auto* side : {&spec.inputs, &spec.outputs})
    for (const Named& named : *side) {
      if (!names.insert(named.name).second) throw json::Value::wrong("two tensors have one name");
      if (side == &spec.inputs && named.integers != (named.ids > 0))
        throw json::Value::wrong("an input is neither float32 nor ids");
      timed = timed || (side == &spec.inputs && named.timed);
    }
  if (!timed) throw json::Value::wrong("no input of its step has a value for each token");
}

// Throws unless a value is one of those that the format names.
inline const std::string& one_of(const char* field, const std::string& value,
                                 std::initializer_list<const char*> known) {
  if (std::find(known.begin(), known.end(), value) == known.end())
    throw json::Value::wrong(std::string("its ") + field + " is " + shown(value));
  return value;
}

inline Spec parse_fields(const json::Value& document) {
  Spec spec;
  const json::Value& model = document.at("model");
  const json::Value& rule = document.at("rule");
  const auto word = [&](const char* field, std::initializer_list<const char*> known) {
    return one_of(field, document.at(field).string(), known);
  };
  spec.vocabulary = model.at("vocab_size").integer(0, max_size);
  model.at("layers").integer(0, max_layers);
  spec.segment = rule.at("segment").integer(1, max_size);
  spec.memory = rule.at("mem_len").integer(0, max_size);
  spec.opset = document.at("opset").integer(1, 1000);
  spec.precision = document.at("precision").string();
  spec.form = word("form", {"ring", "shift", "hidden", "own"});
  spec.storage = word("storage", {"external", "single-file", "ort"});
  spec.target = word("target", {"onnxruntime", "tensorrt", "web"});
  spec.tolerance = document.at("tolerance").number();
  spec.mean_tolerance = document.at("mean_tolerance").number();
  // Saved streams use these two names for other things.
  std::set<std::string> names = {"positions", "__metadata__"};
  const auto& inputs = document.at("inputs").list();
  for (const json::Value& entry : inputs) {
    if (entry.at("name").string() == "logit_rows") spec.selective = true;
    if (!entry.find("present")) continue;
    if (spec.state.size() == max_state) throw json::Value::wrong("it has more memory tensors than any model");
    spec.state.push_back(parse_state(entry));
    if (!names.insert(spec.state.back().name).second || !names.insert(spec.state.back().present).second)
      throw json::Value::wrong("two memory tensors have one name, or one has a name of saved streams");
  }
  if (!spec.language_model()) add_named(spec, document);
  if (const json::Value* without = document.find("without"))
    for (const json::Value& promise : without->list())
      spec.without.insert(one_of("without", promise.string(), {"padding", "unequal", "cuts", "rows"}));
  if (const json::Value* rows = document.find("fixed_rows")) spec.fixed_rows = rows->integer(1, 65536);
  if (spec.fixed_rows && spec.selective)
    throw json::Value::wrong("its graph has fixed sizes and a large vocabulary");
  if (const json::Value* tokens = document.find("fixed_tokens")) {
    for (const json::Value& count : tokens->list())
      spec.fixed_tokens.insert(count.integer(1, spec.segment));
    if (!spec.fixed_rows || !spec.fixed_tokens.count(1))
      throw json::Value::wrong("its graphs have no fixed sizes, or none has one token");
  }
  const json::Value& files = document.at("files");
  if (!files.is(json::Kind::object)) throw json::Value::wrong("its files are no object");
  for (std::size_t index = 0; index < files.keys.size(); ++index) {
    const std::string& name = files.keys[index];
    if (!is_plain_name(name)) throw json::Value::wrong("it lists a file outside its folder");
    const json::Value& facts = files.items[index];
    spec.files[name] = {facts.at("sha256").string(),
                        static_cast<std::uint64_t>(facts.at("num_bytes").integer(0, INT64_MAX))};
  }
  std::set<std::string> needed = {spec.graph_file(), "reference.json", "reference.bin"};
  if (spec.language_model()) needed.insert("vocab.json");
  if (spec.storage == "external") needed.insert("weights.bin");
  for (const std::int64_t tokens : spec.fixed_tokens) needed.insert(spec.graph_of(tokens));
  for (const std::string& name : needed)
    if (!spec.has(name)) throw json::Value::wrong("it does not list " + name);
  return spec;
}

// Runs what reads a JSON file, and makes the half sentences of its errors whole.
template <class Read>
auto naming(const std::filesystem::path& path, Read read) {
  try {
    return read();
  } catch (const Error& error) {
    throw Error(Fault::artefact, path.string() + " is damaged or of another version: " + error.what() +
                                     "; export the artefact again.");
  }
}

// The spec of an artefact folder, its digest verified; the files that it lists are not.
inline Spec read_spec(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "spec.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error(Fault::artefact, folder.string() +
                                     " is not an artefact: it has no spec.json; make one with "
                                     "`xl-export export RUN --out ARTEFACT`.");
  const Bytes bytes = read_file(path, max_spec_bytes);
  const json::Value document = naming(path, [&] { return json::parse(as_text(bytes)); });
  const std::int64_t schema = naming(path, [&] { return document.at("schema").integer(1, INT64_MAX); });
  if (schema > 1)
    throw Error(Fault::artefact, path.string() + " has schema " + std::to_string(schema) +
                                     ", and this program reads schema 1; compile it with a newer release, or "
                                     "export the artefact with an older one.");
  return naming(path, [&] {
    Spec spec = parse_fields(document);
    // The digest is over all bytes before it, so it does not depend on how a parser reads numbers.
    const std::string& stated = document.at("digest").string();
    const std::size_t head = std::min(as_text(bytes).rfind("\"digest\""), bytes.size());
    // The digest must come last: it covers only the bytes before it.
    const bool last = as_text(bytes).find(',', head) == std::string_view::npos;
    if (!last || sha256(bytes.data(), head) != stated)
      throw json::Value::wrong("it was altered: its digest does not match its content");
    spec.identity = sha256(bytes.data(), bytes.size());
    return spec;
  });
}

}  // namespace detail
}  // namespace xl_export

#endif
