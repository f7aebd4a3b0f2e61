// `spec.json`: what a runtime must know about an artefact, and the proof that the artefact is intact. Every
// field is described in docs/reference/format.md.
#ifndef XL_EXPORT_SPEC_HPP
#define XL_EXPORT_SPEC_HPP

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace xl_export {

// Of the numbers of a memory tensor.
enum class ElementType { float32, float16, int8 };

// One memory tensor: the graph reads `name` and returns `present`, of the same type and shape.
struct State {
  std::string name, present;
  ElementType dtype = ElementType::float32;
  std::vector<std::int64_t> sizes;  // of one row; the axis of the batch comes before them

  std::size_t row_bytes() const;
};

// What decides whether an artefact continues a saved stream.
struct MemoryIdentity {
  std::string layout;   // hash of what the numbers of a memory mean
  std::string weights;  // hash of the trained weights, before their precision was reduced
};

// An input or output of a step that is no language model, and is not memory.
struct Named {
  std::string name;
  bool integers = false;            // int64 numbers; otherwise float32
  std::int64_t ids = 0;             // of an input of ids: how many there are
  bool timed = false;               // whether it has a value for each token, or one for each row
  std::vector<std::int64_t> sizes;  // of one value

  std::size_t value_size() const;
};

namespace detail {

// Hash and size of a file, as spec.json records them.
struct FileFacts {
  std::string sha256;
  std::uint64_t num_bytes = 0;
};

}  // namespace detail

// The contract of one artefact, as far as a loop needs it.
struct Spec {
  std::string identity;   // the SHA-256 of spec.json
  MemoryIdentity memory_identity;
  std::string form;       // of the memory: ring, shift, hidden or own
  std::string precision;  // of the weights
  std::string exporter;   // what made the graph: graph or trace
  std::string target;     // onnxruntime, tensorrt or web
  std::string storage;    // where graph and weights are: external, single-file, ort or fused-ort
  double tolerance = 0, mean_tolerance = 0;  // of `check`, in nats
  // Largest and mean change of a traced module's answers if its weights are rounded once more, in nats.
  double rounding = 0, mean_rounding = 0;
  std::int64_t vocabulary = 0;               // V, the number of tokens; 0 of a step that is no language model
  std::int64_t segment = 0;                  // the most tokens of one step
  std::int64_t memory = 0;                   // the tokens that are remembered
  std::int64_t opset = 0;                    // of the graph's standard operators
  bool selective = false;                    // the graph computes only the distributions that are asked for
  std::vector<State> state;
  std::vector<Named> inputs, outputs;   // of a step that is no language model, without the positions
  std::set<std::string> without;        // the promises that the artefact does not keep
  std::int64_t fixed_rows = 0;          // of every step; 0 for any
  std::set<std::int64_t> fixed_tokens;  // of several graphs: the tokens of each; empty for one graph
  std::map<std::string, detail::FileFacts> files;

  bool has(const std::string& file) const { return files.count(file) != 0; }

  bool language_model() const { return vocabulary > 0; }

  // Whether weights or memory are stored in fewer bits than they were trained in.
  bool lossy() const;

  // The file with the graph of standard operators.
  const char* graph_file() const;

  // The file of the graph that is fixed to this number of tokens.
  std::string graph_of(std::int64_t tokens) const;

  // The tokens that one run of a graph computes of a step: the largest of several graphs that fits.
  std::int64_t tokens_at_once(std::int64_t length) const;

  // Whether a memory tensor holds the scales of the tensor of bytes before it.
  bool is_scale(std::size_t index) const;

  // Whether past and present of the memory are one buffer. A graph for WebGPU makes a ring anew in each step.
  bool ring() const { return form == "ring"; }
  bool in_place() const { return ring() && target != "web"; }

  std::size_t row_bytes() const;
};

}  // namespace xl_export

#endif
