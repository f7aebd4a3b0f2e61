// An artefact on ONNX Runtime: streams are started, and advance segment by segment.
#ifndef XL_EXPORT_SESSION_HPP
#define XL_EXPORT_SESSION_HPP

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "error.hpp"
#include "memory.hpp"
#include "sampler.hpp"
#include "spec.hpp"
#include "vocabulary.hpp"

namespace xl_export {

enum class Provider { cpu, cuda };

// How an artefact is opened.
struct Options {
  int threads = 0;  // of one step; 0 leaves the number to ONNX Runtime
  // CUDA needs ONNX Runtime's library for GPUs. The memory stays on the host there and is copied in each
  // step.
  Provider provider = Provider::cpu;
  int device = 0;  // the number of the GPU
  // Whether to use the fused operator on the CPU, if it is built into the program (-DXL_EXPORT_FUSED=ON) and
  // the artefact has a graph for it.
  bool fused = true;
  // The library of the fused operator, as `xl-export fused-kernel` prints its path, instead of what is built
  // in. Loading a library executes it, so name only a file that no other user may write; no folder is
  // searched.
  std::string fused_library;
  // The only `Spec::identity` that is accepted.
  std::optional<std::string> expected_identity;
  // The PEM file of an Ed25519 key: only an artefact whose spec.json was signed with its private key is
  // accepted. The library must be built with -DXL_EXPORT_SIGNATURES=ON.
  std::optional<std::string> public_key;
};

// log of the sum of exponentials of some logits; NaN where one is.
double log_sum_exp(View<float> logits);

// The numbers of an input or output of a step that is no language model, row by row: `integers` of ids and of
// int64 outputs, `floats` of all others.
struct Array {
  std::vector<float> floats;
  std::vector<std::int64_t> integers;
  std::vector<std::int64_t> shape = {};  // of an output; an input's follows from the spec
};
using Arrays = std::map<std::string, Array>;

namespace detail {
struct Loaded;
}

// A model that advances B streams. Several threads may use one session, each with memory of its own. Copies
// share the model.
class Session {
 public:
  // Verifies the digest and every hash of the artefact in a folder, then loads it. Throws Error.
  static Session open(const std::string& folder, const Options& options = {});

  const Spec& spec() const;
  // Throws Error for a step that is no language model.
  const Vocabulary& vocabulary() const;
  // How the model recommends to draw tokens (sampling.json). generate() does so unless it is given a sampler.
  const Sampler& sampler() const;
  const std::string& folder() const;
  // "standard" or "fused": whose operators compute a step.
  const char* kernel() const;

  // The memory of new streams, all at position 0.
  Memory start(std::int64_t batch = 1) const;

  // Each of the three functions below feeds one segment, tokens [B, T] row by row, and updates the memory.
  // For tokens or a memory that do not fit they throw and leave the memory as it was. After a step that
  // failed in ONNX Runtime, a memory that is written in place must be started again.
  //
  // Each writes into the caller's numbers, which must have exactly the size of the answer, or returns new
  // ones. A step into the same numbers with as many tokens as the one before allocates nothing of its own.

  // Logits [B, T, V] of the token after each token.
  void step(View<std::int64_t> tokens, Memory& memory, Span<float> logits) const;
  std::vector<float> step(View<std::int64_t> tokens, Memory& memory) const;

  // Logits [B, V] of the token after the last token of each row.
  void predict(View<std::int64_t> tokens, Memory& memory, Span<float> logits) const;
  std::vector<float> predict(View<std::int64_t> tokens, Memory& memory) const;

  // log p(target) [B, T] in nats, of the token after each token; 0 where a target is -1, not wanted.
  void score(View<std::int64_t> tokens, View<std::int64_t> targets, Memory& memory,
             Span<float> log_probs) const;
  std::vector<float> score(View<std::int64_t> tokens, View<std::int64_t> targets, Memory& memory) const;

  // Logits [V] after any number of tokens of one stream, fed in segments. Returns false, without logits, if
  // `cancel` was set before the last segment.
  bool feed(View<std::int64_t> tokens, Memory& memory, Span<float> logits,
            const std::atomic<bool>* cancel = nullptr) const;
  std::vector<float> feed(View<std::int64_t> tokens, Memory& memory) const;

  // The outputs of any other step by name, which are made as large as they must be. inputs: [B, T, …] or, of
  // a constant, [B, …], without the positions.
  void step(const Arrays& inputs, Memory& memory, Arrays& outputs) const;
  Arrays step(const Arrays& inputs, Memory& memory) const;

 private:
  explicit Session(std::shared_ptr<const detail::Loaded> parts);

  std::shared_ptr<const detail::Loaded> parts_;
};

}  // namespace xl_export

#endif
