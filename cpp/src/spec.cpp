#include "include/xl_export/spec.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <optional>

#include "element_types.hpp"
#include "fields.hpp"
#include "file.hpp"
#include "limits.hpp"
#include "sha256.hpp"
#include "signature.hpp"
#include "spec_file.hpp"

namespace xl_export {

std::size_t State::row_bytes() const {
  std::size_t bytes = detail::facts_of(dtype).num_bytes;
  for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

std::size_t Named::value_size() const {
  std::size_t size = 1;
  for (const std::int64_t each : sizes) size *= static_cast<std::size_t>(each);
  return size;
}

bool Spec::lossy() const {
  return precision != "fp32" || std::any_of(state.begin(), state.end(), [](const State& each) {
           return each.dtype != ElementType::float32;
         });
}

const char* Spec::graph_file() const {
  return storage == "ort" ? "step.ort" : storage == "fused-ort" ? "fused.ort" : "step.onnx";
}

std::string Spec::graph_of(std::int64_t tokens) const {
  return tokens == segment ? graph_file() : "step." + std::to_string(tokens) + ".onnx";
}

std::int64_t Spec::tokens_at_once(std::int64_t length) const {
  return fixed_tokens.empty() ? length : *std::prev(fixed_tokens.upper_bound(length));
}

bool Spec::is_scale(std::size_t index) const {
  return index > 0 && detail::facts_of(state[index - 1].dtype).scaled &&
         state[index].name == state[index - 1].name + "_scale";
}

std::size_t Spec::row_bytes() const {
  std::size_t bytes = 0;
  for (const State& tensor : state) bytes += tensor.row_bytes();
  return bytes;
}

namespace detail {
namespace {

// A tensor as spec.json lists it.
struct Tensor {
  std::string name, dtype;
  std::vector<std::string> shape;  // sizes as JSON writes them: 7, or "batch" in quotation marks
  std::optional<std::string> present;
  std::int64_t ids = 0;  // 0 if it has none

  bool operator==(const Tensor& other) const {
    return name == other.name && dtype == other.dtype && shape == other.shape && present == other.present &&
           ids == other.ids;
  }
};

using Tensors = std::vector<Tensor>;

const char* const batch_axis = "\"batch\"";
const char* const tokens_axis = "\"tokens\"";

Tensors read_tensors(const json::Value& list) {
  Tensors tensors;
  for (const json::Value& entry : list.items) {
    tensors.push_back({entry.at("name").text, entry.at("dtype").text, {}, {}, 0});
    for (const json::Value& size : entry.at("shape").items)
      tensors.back().shape.push_back(size.is(json::Kind::string) ? '"' + size.text + '"'
                                                                 : std::to_string(size.integer()));
    const json::Value *present = entry.find("present"), *ids = entry.find("ids");
    if (present && present->is(json::Kind::string)) tensors.back().present = present->text;
    if (ids && ids->is(json::Kind::number)) tensors.back().ids = ids->integer();
  }
  return tensors;
}

// Of heads that share memory tensors.
struct HeadGroup {
  std::string name;
  std::int64_t heads, mem_len;
};

// The heads of each layer in groups of similar span (`head_groups` in runtimes/contract/tensors.py).
std::vector<HeadGroup> head_groups(const json::Value& model, std::int64_t mem_len, bool splits) {
  const std::int64_t all = model.at("heads").integer(), layers = model.at("layers").integer();
  const std::int64_t count = model.at("sublayers").text == "head-split" ? all / 2 : all;
  const std::vector<json::Value>& reaches = model.at("reaches").items;
  std::vector<HeadGroup> found;
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    if (reaches.empty()) {
      found.push_back({std::to_string(layer), count, mem_len});
      continue;
    }
    std::vector<std::int64_t> reach, order(static_cast<std::size_t>(count));
    for (const json::Value& each : reaches[static_cast<std::size_t>(layer)].items)
      reach.push_back(each.integer());
    const auto reach_of = [&](std::int64_t head) { return reach[static_cast<std::size_t>(head)]; };
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return reach_of(a) > reach_of(b); });
    std::vector<HeadGroup> groups;
    for (const std::int64_t head : order) {
      const std::int64_t span = std::min(reach_of(head), mem_len);
      const std::int64_t longest = groups.empty() ? span : groups.back().mem_len;
      const bool shorter = 2 * span < longest && longest - span >= table("group_step").integer();
      if (groups.empty() || (splits && shorter))
        groups.push_back({std::to_string(layer) + "." + std::to_string(groups.size()), 0, span});
      ++groups.back().heads;
    }
    if (groups.size() == 1) groups[0].name = std::to_string(layer);
    found.insert(found.end(), groups.begin(), groups.end());
  }
  return found;
}

// The memory tensors that follow from a model, its rule and its form. The rules of `contradiction` hold.
Tensors state_tensors(const json::Value& document) {
  const json::Value &model = document.at("model"), &rule = document.at("rule");
  const json::Value& form = table("forms").at(document.at("form").text);
  const std::string& dtype = table("memory_types").at(document.at("memory_precision").text).text;
  const std::string& holds = form.at("holds").text;
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  for (const json::Value& shape : document.at("memory_shapes").items) {
    rows.push_back({std::to_string(rows.size()), {}});
    for (const json::Value& size : shape.items) rows.back().second.push_back(std::to_string(size.integer()));
  }
  if (holds != "own")
    for (const HeadGroup& group : head_groups(model, rule.at("mem_len").integer(), holds == "keys")) {
      rows.push_back({group.name, {}});
      for (const json::Value& axis : form.at("axes").items) {
        const std::int64_t size = axis.text == "heads"     ? group.heads
                                  : axis.text == "mem_len" ? group.mem_len
                                  : axis.text == "slots"   ? group.mem_len + rule.at("segment").integer()
                                                           : model.at(axis.text).integer();
        rows.back().second.push_back(std::to_string(size));
      }
    }
  Tensors found;
  for (auto& [name, row] : rows) {
    row.insert(row.begin(), batch_axis);
    for (const json::Value& pair : form.at("tensors").items) {
      const auto named = [&, group = name](std::size_t which) {
        std::string text = pair.items[which].text;
        return text.replace(text.find("{}"), 2, group);
      };
      found.push_back({named(0), dtype, row, named(1), 0});
      if (!element_type(dtype).scaled) continue;
      found.push_back({named(0) + "_scale", "float32", row, named(1) + "_scale", 0});
      found.back().shape.back() = "1";
    }
  }
  return found;
}

bool is_selective(const json::Value& model) {
  return !model.at("cutoffs").items.empty() ||
         model.at("vocab_size").integer() > table("selective_from").integer();
}

// The inputs or outputs (which: 0 or 1) of a language model.
Tensors language_model_tensors(const json::Value& model, std::size_t which) {
  const char* kind = is_selective(model) ? "selective" : "plain";
  Tensors found = read_tensors(table("language_model").at(kind).items[which]);
  for (Tensor& tensor : found)
    std::replace(tensor.shape.begin(), tensor.shape.end(), std::string("\"vocab_size\""),
                 std::to_string(model.at("vocab_size").integer()));
  return found;
}

// The sizes of a tensor after its batch, and its tokens if it has them; -1 for any other name.
std::vector<std::int64_t> sizes_of(const Tensor& tensor, std::size_t from) {
  std::vector<std::int64_t> sizes;
  for (std::size_t axis = from; axis < tensor.shape.size(); ++axis)
    sizes.push_back(tensor.shape[axis][0] == '"' ? -1 : std::stoll(tensor.shape[axis]));
  return sizes;
}

bool is_timed(const Tensor& tensor) {
  return tensor.shape.size() > 1 && tensor.shape[1] == tokens_axis;
}

// Whether these are inputs and outputs of a step that is no language model (`refuse_signature` in Python).
bool is_step(const Tensors& inputs, const Tensors& outputs) {
  const Tensor positions = {"position_ids", "int64", {batch_axis, tokens_axis}, {}, 0};
  if (inputs.size() < 2 || outputs.empty() || !(inputs.back() == positions)) return false;
  std::set<std::string> names = {positions.name};
  bool timed = false;
  for (const Tensors* side : {&inputs, &outputs})
    for (const Tensor& tensor : *side) {
      if (&tensor == &inputs.back()) continue;
      json::Value name;
      name.kind = json::Kind::string, name.text = tensor.name;
      const bool first = names.insert(tensor.name).second, input = side == &inputs;
      const std::vector<std::int64_t> sizes = sizes_of(tensor, is_timed(tensor) ? 2 : 1);
      double numbers = 1;
      for (const std::int64_t size : sizes) numbers *= static_cast<double>(size);
      const bool sound = tensor.shape.size() <= static_cast<std::size_t>(table("max_axes").integer()) &&
                         !tensor.shape.empty() && tensor.shape[0] == batch_axis &&
                         numbers <= table("max_value").number() &&
                         std::all_of(sizes.begin(), sizes.end(),
                                     [](std::int64_t size) { return size >= 1 && size <= max_size; });
      const bool typed =
          tensor.dtype == "int64" ? !input || tensor.ids : tensor.dtype == "float32" && !tensor.ids;
      if (!first || !fault(table("name"), name, "").empty() || !sound || !typed) return false;
      timed = timed || (input && is_timed(tensor));
    }
  return timed;
}

// Of a product of sizes, as a double, because it may be larger than any integer.
double row_bytes_of(const Tensors& state) {
  double sum = 0;
  for (const Tensor& tensor : state) {
    auto bytes = static_cast<double>(element_type(tensor.dtype).num_bytes);
    for (const std::int64_t size : sizes_of(tensor, 1)) bytes *= static_cast<double>(size);
    sum += bytes;
  }
  return sum;
}

// Throws if a spec, whose fields have their types, contradicts itself. Python's `read_spec` and JavaScript
// have the same rules. Returns its memory tensors.
Tensors refuse_contradictions(const Spec& spec, const json::Value& document, const Tensors& inputs,
                              const Tensors& outputs) {
  const auto refuse = [](bool holds, const std::string& what) {
    if (holds) throw json::Value::wrong(what);
  };
  const json::Value &model = document.at("model"), &rule = document.at("rule");
  const json::Value &shapes = document.at("memory_shapes"), &reaches = model.at("reaches");
  const json::Value& form = table("forms").at(spec.form);
  const std::string& memory_precision = document.at("memory_precision").text;
  const bool own = form.at("holds").text == "own", graph = spec.exporter == "graph";
  if (model.at("sublayers").text != "own")
    for (const json::Value& size : table("sizes").items)
      refuse(model.at(size.text).integer() == 0, "its model has no " + size.text);
  const auto layers = static_cast<std::size_t>(model.at("layers").integer());
  refuse(!reaches.items.empty() && reaches.items.size() != layers, "reaches is not one for each layer");
  for (const json::Value& row : reaches.items)
    refuse(row.items.size() != static_cast<std::size_t>(model.at("heads").integer()),
           "reaches is not one for each head");
  const bool scaled = element_type(table("memory_types").at(memory_precision).text).scaled;
  refuse(scaled && !form.at("circular").boolean(), "only ring memory can be int8");
  refuse(!shapes.items.empty() && !own, "memory_shapes is given, and its tensors follow from its model");
  refuse(shapes.items.size() > static_cast<std::size_t>(table("max_states").integer()),
         "it has more memory tensors than any model");
  for (const json::Value& shape : shapes.items)
    refuse(shape.items.size() > static_cast<std::size_t>(table("max_axes").integer()),
           "a memory tensor has too many axes");
  const Tensors state = state_tensors(document);
  refuse(row_bytes_of(state) > table("max_row_bytes").number(), "its memory is larger than any");
  const bool words = spec.language_model();
  refuse(!words && !is_step(inputs, outputs), "its inputs or outputs are no step's");
  Tensors wanted_inputs = words ? language_model_tensors(model, 0) : inputs;
  Tensors wanted_outputs = words ? language_model_tensors(model, 1) : outputs;
  for (const Tensor& past : state) {
    wanted_inputs.push_back(past);
    wanted_outputs.push_back({*past.present, past.dtype, past.shape, {}, 0});
  }
  refuse(read_tensors(document.at("inputs")) != wanted_inputs ||
             read_tensors(document.at("outputs")) != wanted_outputs,
         "its inputs or outputs do not follow from its model");
  const double roundings = table("roundings").number();
  const json::Value& limits = table("limits").at(spec.precision + " " + memory_precision + " " + spec.target);
  refuse(document.at("answers").text != limits.items[0].text ||
             spec.tolerance != std::max(limits.items[1].number(), roundings * spec.rounding) ||
             spec.mean_tolerance != std::max(limits.items[2].number(), roundings * spec.mean_rounding),
         "its answers or tolerances do not follow from its precision");
  const std::vector<json::Value>& counts = document.at("fixed_tokens").items;
  refuse(graph && (own || !words || !spec.without.empty() || spec.rounding + spec.mean_rounding > 0),
         "its graph was written, and has what only traced ones have");
  const bool ascending = counts.size() == spec.fixed_tokens.size() &&
                         std::is_sorted(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
                           return a.integer() < b.integer();
                         });
  const bool cuttable = ascending && spec.fixed_tokens.count(1) && spec.fixed_tokens.count(spec.segment) &&
                        spec.storage == "external" &&
                        table("cuts_change_nothing").at(rule.at("mask").text).boolean() &&
                        !spec.without.count("cuts");
  refuse(!counts.empty() && !cuttable, "its steps cannot be cut into its numbers of tokens");
  refuse(spec.fixed_rows && spec.selective, "its graph has fixed sizes and a large vocabulary");
  for (const json::Value& name : table("external_files").items)
    refuse(spec.storage != "external" && spec.has(name.text),
           "its weights are in its graph, and it lists " + name.text);
  std::set<std::string> needed;
  for (const json::Value& name : table("graph_files").at(spec.storage).items) needed.insert(name.text);
  for (const json::Value& name : table("needed").items) needed.insert(name.text);
  if (words) needed.insert(table("vocabulary").text);
  for (const std::int64_t tokens : spec.fixed_tokens) needed.insert(spec.graph_of(tokens));
  for (const std::string& name : needed) refuse(!spec.has(name), "it does not list " + name);
  return state;
}

Spec parse_fields(const json::Value& document) {
  Spec spec;
  const json::Value &model = document.at("model"), &rule = document.at("rule");
  spec.vocabulary = model.at("vocab_size").integer();
  spec.segment = rule.at("segment").integer();
  spec.memory = rule.at("mem_len").integer();
  spec.opset = document.at("opset").integer();
  spec.precision = document.at("precision").text;
  const json::Value& memory = document.at("memory_identity");
  spec.memory_identity = {memory.at("layout").text, memory.at("weights").text};
  spec.form = document.at("form").text;
  spec.storage = document.at("storage").text;
  spec.target = document.at("target").text;
  spec.exporter = document.at("exporter").text;
  if (const json::Value* rounding = document.find("rounding")) spec.rounding = rounding->number();
  if (const json::Value* mean = document.find("mean_rounding")) spec.mean_rounding = mean->number();
  spec.tolerance = document.at("tolerance").number();
  spec.mean_tolerance = document.at("mean_tolerance").number();
  spec.selective = is_selective(model);
  for (const json::Value& promise : document.at("without").items) spec.without.insert(promise.text);
  const json::Value* rows = document.find("fixed_rows");
  if (rows && !rows->is(json::Kind::null)) spec.fixed_rows = rows->integer();
  for (const json::Value& count : document.at("fixed_tokens").items)
    spec.fixed_tokens.insert(count.integer());
  const json::Value& files = document.at("files");
  for (std::size_t index = 0; index < files.keys.size(); ++index)
    spec.files[files.keys[index]] = {
        files.items[index].at("sha256").text,
        static_cast<std::uint64_t>(files.items[index].at("num_bytes").integer())};
  Tensors inputs, outputs;
  std::set<std::string> after;
  for (const Tensor& tensor : read_tensors(document.at("inputs")))
    if (!tensor.present)
      inputs.push_back(tensor);
    else
      after.insert(*tensor.present);
  for (const Tensor& tensor : read_tensors(document.at("outputs")))
    if (!after.count(tensor.name)) outputs.push_back(tensor);
  for (const Tensor& tensor : refuse_contradictions(spec, document, inputs, outputs)) {
    const ElementType dtype = element_type(tensor.dtype).type;
    spec.state.push_back({tensor.name, *tensor.present, dtype, sizes_of(tensor, 1)});
  }
  if (spec.language_model()) return spec;
  inputs.pop_back();  // the positions
  for (const Tensors* side : {&inputs, &outputs})
    for (const Tensor& tensor : *side)
      (side == &inputs ? spec.inputs : spec.outputs)
          .push_back({tensor.name, tensor.dtype == "int64", tensor.ids, is_timed(tensor),
                      sizes_of(tensor, is_timed(tensor) ? 2 : 1)});
  return spec;
}

}  // namespace

Spec read_spec(const std::filesystem::path& folder, const std::optional<std::string>& public_key) {
  const std::filesystem::path path = folder / "spec.json";
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    throw Error(Fault::artefact, folder.string() +
                                     " is not an artefact: it has no spec.json; make one with "
                                     "`xl-export export RUN --out ARTEFACT`.");
  const Bytes bytes = read_file(path, max_spec_bytes);
  if (public_key) verify_signature(path, bytes, *public_key);
  json::Value document = naming(path, [&] { return json::parse(as_text(bytes)); });
  const json::Value* stated = naming(path, [&] { return document.find("schema"); });
  const std::int64_t schema = stated && stated->is(json::Kind::number) ? std::atoll(stated->text.c_str()) : 1;
  if (schema > 1)
    throw Error(Fault::artefact, path.string() + " has schema " + std::to_string(schema) +
                                     ", and this program reads schema 1; compile it with a newer release, or "
                                     "export the artefact with an older one.");
  return naming(path, [&] {
    verify_fields("spec", document);
    // The digest is over all bytes before it, so it does not depend on how a parser reads numbers.
    const std::string& digest = document.at("digest").string();
    const std::size_t head = std::min(as_text(bytes).rfind("\"digest\""), bytes.size());
    // The digest must come last: it covers only the bytes before it.
    const bool last = as_text(bytes).find(',', head) == std::string_view::npos;
    if (!last || sha256(bytes.data(), head) != digest)
      throw json::Value::wrong("it was altered: its digest does not match its content");
    Spec spec = parse_fields(document);
    spec.identity = sha256(bytes.data(), bytes.size());
    return spec;
  });
}

}  // namespace detail
}  // namespace xl_export
