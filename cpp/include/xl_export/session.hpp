// An artefact on ONNX Runtime: streams are started, and advance segment by segment.
#ifndef XL_EXPORT_SESSION_HPP
#define XL_EXPORT_SESSION_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "loading.hpp"
#include "memory.hpp"
#include "ort.hpp"
#include "spec.hpp"
#include "text/vocabulary.hpp"

namespace xl_export {

// log of the sum of exponentials of some logits; NaN where one is.
inline double log_sum_exp(View<float> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

// The numbers of an input or output of a step that is no language model, row by row: `integers` of ids and of
// int64 outputs, `floats` of all others.
struct Array {
  std::vector<float> floats;
  std::vector<std::int64_t> integers;
};
using Arrays = std::map<std::string, Array>;

// A model that advances B streams. Several threads may use one session, each with memory of its own.
class Session {
 public:
  // Verifies the digest and every hash of the artefact in a folder, then loads it. Throws Error.
  static Session open(const std::filesystem::path& folder, const Options& options = {}) {
    return detail::ort::edge("the session", [&] { return Session(folder, detail::load(folder, options)); });
  }

  const Spec& spec() const { return parts_.spec; }
  // Throws Error for a step that is no language model.
  const Vocabulary& vocabulary() const {
    refuse_no_language_model();
    return *parts_.vocabulary;
  }
  // How the model recommends to draw tokens (sampling.json). generate() does so unless it is given a sampler.
  const Sampler& sampler() const { return parts_.sampler; }
  const std::filesystem::path& folder() const { return folder_; }
  // "standard" or "fused": whose operators compute a step.
  const char* kernel() const { return parts_.fused ? "fused" : "standard"; }

  // The memory of new streams, all at position 0.
  Memory start(std::int64_t batch = 1) const {
    if (batch < 1 || batch > detail::most_streams)
      throw Error(Fault::stream, "batch is " + std::to_string(batch) + "; expected 1 to 65536 rows.");
    const double sets = spec().in_place() ? 1 : 2;
    const double bytes = sets * static_cast<double>(batch) * static_cast<double>(spec().row_bytes());
    if (bytes > detail::machine_bytes())
      throw Error(Fault::stream, "the memory of " + std::to_string(batch) +
                                     " streams does not fit into the memory of this machine; use a smaller "
                                     "batch.");
    return detail::ort::edge("the memory of the streams", [&] {
      return Memory(spec().state, batch, spec().identity, spec().memory_identity, spec().in_place());
    });
  }

  // Each of the three functions below feeds one segment, tokens [B, T] row by row, and updates the memory.
  // For tokens or a memory that do not fit they throw and leave the memory as it was. After a step that
  // failed in ONNX Runtime, a memory that is written in place must be started again.

  // Logits [B, T, V] of the token after each token.
  std::vector<float> step(View<std::int64_t> tokens, Memory& memory) const {
    return advance(tokens, {}, memory, Wanted::all).logits;
  }

  // The outputs of any step by name. inputs: [B, T, …] or, of a constant, [B, …], without the positions.
  Arrays step(const Arrays& inputs, Memory& memory) const {
    return detail::in_memory("the step", [&] { return stepped(inputs, memory); });
  }

  // Logits [B, V] of the token after the last token of each row.
  std::vector<float> predict(View<std::int64_t> tokens, Memory& memory) const {
    std::vector<float> logits = advance(tokens, {}, memory, Wanted::last).logits;
    if (spec().selective) return logits;
    const auto batch = static_cast<std::size_t>(memory.batch()), length = tokens.size() / batch;
    const auto size = static_cast<std::size_t>(spec().vocabulary);
    for (std::size_t row = 0; row < batch && length > 1; ++row)
      std::copy_n(logits.begin() + static_cast<std::ptrdiff_t>(((row + 1) * length - 1) * size), size,
                  logits.begin() + static_cast<std::ptrdiff_t>(row * size));
    logits.resize(batch * size);
    return logits;
  }

  // log p(target) [B, T] in nats, of the token after each token; 0 where a target is -1, not wanted.
  std::vector<float> score(View<std::int64_t> tokens, View<std::int64_t> targets, Memory& memory) const {
    if (targets.size() != tokens.size())
      throw Error(Fault::stream, std::to_string(targets.size()) + " targets were given for " +
                                     std::to_string(tokens.size()) + " tokens; give one for each, or -1.");
    for (const std::int64_t target : targets)
      if (target < -1 || target >= spec().vocabulary)
        throw Error(Fault::stream, "target " + std::to_string(target) +
                                       " is outside the vocabulary; expected "
                                       "-1 (not wanted) to " +
                                       std::to_string(spec().vocabulary - 1) + ".");
    if (spec().selective) return advance(tokens, targets, memory, Wanted::none).log_probs;
    const std::vector<float> logits = advance(tokens, {}, memory, Wanted::all).logits;
    const auto size = static_cast<std::size_t>(spec().vocabulary);
    std::vector<float> log_probs(tokens.size());
    for (std::size_t at = 0; at < tokens.size(); ++at)
      if (targets[at] >= 0) {
        const View<float> row(logits.data() + at * size, size);
        log_probs[at] = static_cast<float>(row[static_cast<std::size_t>(targets[at])] - log_sum_exp(row));
      }
    return log_probs;
  }

  // Logits [V] after any number of tokens of one stream, fed in segments.
  std::vector<float> feed(View<std::int64_t> tokens, Memory& memory) const {
    if (memory.batch() != 1 || tokens.empty())
      throw Error(Fault::stream,
                  "a text is fed to one stream and has at least one token; use step() for a "
                  "batch.");
    const auto segment = static_cast<std::size_t>(spec().segment);
    std::vector<float> logits;
    for (std::size_t at = 0; at < tokens.size(); at += segment) {
      const auto piece = tokens.part(at, std::min(segment, tokens.size() - at));
      const bool more = at + segment < tokens.size();
      // A large vocabulary's logits are computed only if they are asked for.
      if (spec().selective && more) advance(piece, {}, memory, Wanted::none);
      else logits = predict(piece, memory);
    }
    return logits;
  }

 private:
  enum class Wanted { all, last, none };  // positions whose distributions a selective graph computes
  struct Answers {
    std::vector<float> logits, log_probs;
  };

  Session(std::filesystem::path folder, detail::Loaded parts)
      : folder_(std::move(folder)), parts_(std::move(parts)) {
    for (const auto& input : parts_.inputs) input_names_.push_back(input.name.c_str());
    for (const auto& output : parts_.outputs) output_names_.push_back(output.name.c_str());
  }

  // The number of tokens of each row; throws where tokens and memory do not fit this session.
  std::size_t checked(View<std::int64_t> tokens, const Memory& memory) const {
    const auto batch = static_cast<std::size_t>(memory.batch());
    if (tokens.size() % batch)
      throw Error(Fault::stream, std::to_string(tokens.size()) + " tokens were given for " +
                                     std::to_string(batch) +
                                     " streams; give every stream the same number of tokens.");
    const std::size_t length = tokens.size() / batch;
    refuse_unfit(length, memory);
    for (const std::int64_t token : tokens)
      if (token < 0 || token >= spec().vocabulary)
        throw Error(Fault::stream, "token " + std::to_string(token) +
                                       " is outside the vocabulary; expected 0 "
                                       "to " +
                                       std::to_string(spec().vocabulary - 1) + ".");
    return length;
  }

  // Throws if a step of `length` tokens in each row does not fit this session or the memory.
  void refuse_unfit(std::size_t length, const Memory& memory) const {
    if (memory.owner() != spec().identity)
      throw Error(Fault::stream, "the memory belongs to artefact " + memory.owner().substr(0, 12) +
                                     " and this session runs " + spec().identity.substr(0, 12) +
                                     "; use memory that this session's start() returned.");
    const auto batch = static_cast<std::size_t>(memory.batch());
    if (memory.positions.size() != batch)
      throw Error(Fault::stream, "the memory has " + std::to_string(memory.positions.size()) +
                                     " positions for " + std::to_string(batch) +
                                     " streams; give one position for each stream.");
    for (const std::int64_t at : memory.positions)
      if (at > detail::furthest_position || at < -detail::furthest_position)
        throw Error(Fault::stream,
                    "a position of the memory is beyond 2^62; set it to 0 to start a new text.");
    if (length < 1 || length > static_cast<std::size_t>(spec().segment))
      throw Error(Fault::stream, "the segment has " + std::to_string(length) +
                                     " tokens; this artefact takes at most " +
                                     std::to_string(spec().segment) +
                                     ": feed them in several pieces, or export it with a larger segment.");
    const auto segment = static_cast<std::size_t>(spec().segment);
    const bool any_count = !spec().fixed_tokens.empty();
    if (spec().fixed_rows && (memory.batch() != spec().fixed_rows || (!any_count && length != segment)))
      throw Error(Fault::stream, "the step has " + std::to_string(batch) + " rows of " + std::to_string(length) +
                                     " tokens, and this artefact was traced for exactly " +
                                     std::to_string(spec().fixed_rows) + " rows of " +
                                     (any_count ? "1 to " : "") +
                                     std::to_string(segment) + "; feed that.");
    const std::string broken = "this artefact does not keep the promise `";
    if (spec().without.count("rows") && batch > 1)
      throw Error(Fault::stream, broken + "rows`, so rows would change each other, and the memory has " +
                                     std::to_string(batch) + "; give each stream a memory of its own.");
    for (const std::int64_t at : memory.positions) {
      if (spec().without.count("padding") && at < 0)
        throw Error(Fault::stream, broken + "padding`, and a row is at position " + std::to_string(at) +
                                       "; start each row at position 0.");
      if (spec().without.count("cuts") && at % spec().segment)
        throw Error(Fault::stream, broken + "cuts`, and a row is at position " + std::to_string(at) +
                                       "; a step begins at a multiple of " + std::to_string(spec().segment) +
                                       " tokens: feed whole segments, and a shorter one only at the end.");
    }
  }

  void refuse_no_language_model() const {
    if (spec().language_model()) return;
    throw Error(Fault::stream, "this artefact is no language model: its step reads " +
                                   listed(spec().inputs) + " and returns " + listed(spec().outputs) +
                                   "; use step() with arrays by name.");
  }

  static std::string listed(const std::vector<Named>& tensors) {
    std::string names;
    for (const Named& named : tensors) names += (names.empty() ? "" : ", ") + named.name;
    return names;
  }

  Arrays stepped(Arrays inputs, Memory& memory) const {
    if (spec().language_model())
      throw Error(Fault::stream, "this artefact is a language model; use step(), predict() or score() with "
                                 "its tokens.");
    const auto batch = static_cast<std::size_t>(memory.batch());
    if (inputs.size() != spec().inputs.size())
      throw Error(Fault::stream, std::to_string(inputs.size()) + " inputs were given; expected " +
                                     listed(spec().inputs) + ".");
    std::size_t length = 0;
    bool known = false;
    for (const Named& named : spec().inputs) {
      const auto found = inputs.find(named.name);
      const std::size_t count = found == inputs.end()  ? 0
                                : named.integers       ? found->second.integers.size()
                                                       : found->second.floats.size();
      const std::size_t values = count / batch / named.value_size();
      const bool fits = found != inputs.end() && count == values * batch * named.value_size() &&
                        (named.timed ? !known || values == length : values == 1);
      if (!fits)
        throw Error(Fault::stream, named.name + " has " + std::to_string(count) + " numbers; expected " +
                                       std::to_string(batch * named.value_size()) +
                                       (named.timed ? " for each token, and the same number of tokens in "
                                                      "every input."
                                                    : "."));
      for (const std::int64_t id : found->second.integers)
        if (named.integers && (id < 0 || id >= named.ids))
          throw Error(Fault::stream, named.name + " has the id " + std::to_string(id) + "; expected 0 to " +
                                         std::to_string(named.ids - 1) + ".");
      for (const float number : found->second.floats)
        if (!named.integers && !std::isfinite(number))
          throw Error(Fault::stream, named.name + " has a number that is not finite, and every later answer of "
                                                  "the stream would be NaN; replace it, or leave the step out.");
      if (named.timed) length = values, known = true;
    }
    refuse_unfit(length, memory);
    const std::int64_t B = memory.batch(), T = static_cast<std::int64_t>(length);
    if (spec().tokens_at_once(T) < T) return stepped_in_pieces(inputs, length, memory);
    const auto value_of = [&](const Named& named, Array& array) {
      std::vector<std::int64_t> shape = {B};
      if (named.timed) shape.push_back(T);
      shape.insert(shape.end(), named.sizes.begin(), named.sizes.end());
      return named.integers ? detail::ort::tensor(array.integers, shape)
                            : detail::ort::tensor(array.floats, shape);
    };
    std::vector<detail::ort::Value> fed, returned;
    for (const Named& named : spec().inputs) fed.push_back(value_of(named, inputs[named.name]));
    std::vector<std::int64_t> places = places_of(memory, length);
    fed.push_back(detail::ort::tensor(places, {B, T}));
    Arrays outputs;
    for (const Named& named : spec().outputs) {
      Array& array = outputs[named.name];
      const std::size_t count = static_cast<std::size_t>(named.timed ? B * T : B) * named.value_size();
      if (named.integers) array.integers.resize(count);
      else array.floats.resize(count);
      returned.push_back(value_of(named, array));
    }
    run(fed, returned, memory, T);
    memory.mark_unsure();  // outputs may be ids, or not read the memory
    return outputs;
  }

  // The same for a step whose number of tokens has no graph.
  Arrays stepped_in_pieces(const Arrays& inputs, std::size_t length, Memory& memory) const {
    const auto batch = static_cast<std::size_t>(memory.batch());
    Arrays outputs;
    for (std::size_t at = 0, count; at < length; at += count) {
      count = static_cast<std::size_t>(spec().tokens_at_once(static_cast<std::int64_t>(length - at)));
      Arrays part = inputs;
      for (const Named& named : spec().inputs) {
        if (!named.timed) continue;
        const std::size_t size = named.value_size();
        const Array& whole = inputs.at(named.name);
        part[named.name].floats = tokens_of(whole.floats, batch, length, size, at, count);
        part[named.name].integers = tokens_of(whole.integers, batch, length, size, at, count);
      }
      Arrays found = stepped(std::move(part), memory);
      for (const Named& named : spec().outputs) {
        const std::size_t size = named.value_size();
        Array& to = outputs[named.name];
        if (named.timed) {
          put_tokens(found[named.name].floats, batch, length, size, at, count, to.floats);
          put_tokens(found[named.name].integers, batch, length, size, at, count, to.integers);
        } else {
          to = std::move(found[named.name]);
        }
      }
    }
    return outputs;
  }

  // The `count` tokens from `at` on of each row of an array [B, T, …]; an empty array stays empty.
  template <class Number>
  static std::vector<Number> tokens_of(const std::vector<Number>& all, std::size_t batch, std::size_t length,
                                       std::size_t size, std::size_t at, std::size_t count) {
    std::vector<Number> part;
    for (std::size_t row = 0; row < batch && !all.empty(); ++row) {
      const auto first = all.begin() + static_cast<std::ptrdiff_t>((row * length + at) * size);
      part.insert(part.end(), first, first + static_cast<std::ptrdiff_t>(count * size));
    }
    return part;
  }

  // The inverse: puts a part into an array [B, T, …].
  template <class Number>
  static void put_tokens(const std::vector<Number>& part, std::size_t batch, std::size_t length,
                         std::size_t size, std::size_t at, std::size_t count, std::vector<Number>& all) {
    if (part.empty()) return;
    all.resize(batch * length * size);
    for (std::size_t row = 0; row < batch; ++row)
      std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(row * count * size), count * size,
                  all.begin() + static_cast<std::ptrdiff_t>((row * length + at) * size));
  }

  // The stream positions of T tokens of each row.
  static std::vector<std::int64_t> places_of(const Memory& memory, std::size_t length) {
    std::vector<std::int64_t> places;
    for (const std::int64_t first : memory.positions)
      for (std::size_t at = 0; at < length; ++at) places.push_back(first + static_cast<std::int64_t>(at));
    return places;
  }

  // Runs the graph once, whose other inputs and outputs are the memory's. The memory advances by T tokens.
  void run(const std::vector<detail::ort::Value>& inputs, const std::vector<detail::ort::Value>& outputs,
           Memory& memory, std::int64_t T) const {
    memory.clear_restarted_rows();
    std::vector<const OrtValue*> fed;
    std::vector<OrtValue*> returned;
    for (const auto& value : inputs) fed.push_back(value.get());
    for (const auto& state : memory.now_) fed.push_back(state.value.get());
    for (const auto& value : outputs) returned.push_back(value.get());
    for (const auto& state : memory.present()) returned.push_back(state.value.get());
    const auto shorter = parts_.shorter.find(T);
    OrtSession* session = (shorter == parts_.shorter.end() ? parts_.session : shorter->second).get();
    try {
      detail::ort::check(detail::ort::api().Run(session, nullptr, input_names_.data(),
                                                fed.data(), fed.size(), output_names_.data(),
                                                returned.size(), returned.data()));
    } catch (const detail::ort::Failure& failure) {
      throw Error(Fault::artefact, "ONNX Runtime " + detail::ort::version() + " could not run the step (" +
                                       failure.what() +
                                       "); feed fewer tokens at once where memory was short, and export the "
                                       "artefact again otherwise.");
    }
    memory.advance();
    for (std::int64_t& position : memory.positions) position += T;
  }

  Answers advance(View<std::int64_t> tokens, View<std::int64_t> targets, Memory& memory,
                  Wanted wanted) const {
    refuse_no_language_model();
    return detail::in_memory("the step", [&] { return advanced(tokens, targets, memory, wanted); });
  }

  Answers advanced(View<std::int64_t> tokens, View<std::int64_t> targets, Memory& memory,
                   Wanted wanted) const {
    const std::size_t length = checked(tokens, memory), batch = tokens.size() / length;
    if (spec().tokens_at_once(static_cast<std::int64_t>(length)) < static_cast<std::int64_t>(length))
      return advanced_in_pieces(tokens, targets, length, memory, wanted);
    std::vector<std::int64_t> ids(tokens.begin(), tokens.end()), places = places_of(memory, length), rows;
    for (std::size_t at = 0; at < ids.size(); ++at)
      if (wanted == Wanted::all || (wanted == Wanted::last && (at + 1) % length == 0))
        rows.push_back(static_cast<std::int64_t>(at));
    const std::size_t distributions = spec().selective ? rows.size() : tokens.size();
    std::vector<std::int64_t> asked(targets.begin(), targets.end());
    asked.resize(tokens.size(), -1);
    rows.reserve(1);  // an address, also where nothing is asked for
    Answers answers;
    answers.logits.reserve(1);
    answers.logits.resize(distributions * static_cast<std::size_t>(spec().vocabulary));
    using detail::ort::tensor;
    const auto B = static_cast<std::int64_t>(batch), T = static_cast<std::int64_t>(length);
    std::vector<detail::ort::Value> fed, returned;
    fed.push_back(tensor(ids, {B, T}));
    fed.push_back(tensor(places, {B, T}));
    if (spec().selective) {
      const auto count = static_cast<std::int64_t>(rows.size());
      answers.log_probs.resize(tokens.size());
      fed.push_back(tensor(asked, {B, T}));
      fed.push_back(tensor(rows, {count}));
      returned.push_back(tensor(answers.logits, {count, spec().vocabulary}));
      returned.push_back(tensor(answers.log_probs, {B, T}));
    } else {
      returned.push_back(tensor(answers.logits, {B, T, spec().vocabulary}));
    }
    run(fed, returned, memory, T);
    if (!spec().ring() || !ends_finite(answers, asked, wanted, length)) memory.mark_unsure();
    return answers;
  }

  // The same for a step whose number of tokens has no graph.
  Answers advanced_in_pieces(View<std::int64_t> tokens, View<std::int64_t> targets, std::size_t length,
                             Memory& memory, Wanted wanted) const {
    const auto batch = static_cast<std::size_t>(memory.batch());
    const auto size = static_cast<std::size_t>(spec().vocabulary);
    const std::vector<std::int64_t> ids(tokens.begin(), tokens.end()), asked(targets.begin(), targets.end());
    const bool only_last = spec().selective && wanted == Wanted::last;
    const std::vector<std::int64_t> began = memory.positions;
    Answers answers;
    for (std::size_t at = 0, count; at < length; at += count) {
      count = static_cast<std::size_t>(spec().tokens_at_once(static_cast<std::int64_t>(length - at)));
      const auto part = tokens_of(ids, batch, length, 1, at, count);
      const auto next = tokens_of(asked, batch, length, 1, at, count);
      const Wanted here = only_last && at + count < length ? Wanted::none : wanted;
      Answers found;
      try {
        found = advanced({part.data(), part.size()}, {next.data(), next.size()}, memory, here);
      } catch (...) {
        if (spec().ring()) memory.positions = began;  // its slots are written again
        throw;
      }
      put_tokens(found.log_probs, batch, length, 1, at, count, answers.log_probs);
      if (only_last) answers.logits = std::move(found.logits);
      else put_tokens(found.logits, batch, length, size, at, count, answers.logits);
    }
    return answers;
  }

  // Whether the last answer of every row is finite. A value that is not finite and visible makes every later
  // answer of its row not a number, so it is enough to look at the last one.
  bool ends_finite(const Answers& answers, const std::vector<std::int64_t>& asked, Wanted wanted,
                   std::size_t length) const {
    const auto size = static_cast<std::size_t>(spec().vocabulary);
    for (std::size_t row = 1; row <= asked.size() / length; ++row) {
      const std::size_t last = row * length - 1;
      if (spec().selective && wanted == Wanted::none) {
        if (asked[last] < 0 || !std::isfinite(answers.log_probs[last])) return false;
        continue;
      }
      const std::size_t at = spec().selective && wanted == Wanted::last ? row - 1 : last;
      float sum = 0;
      for (std::size_t token = 0; token < size; ++token) sum += answers.logits[at * size + token];
      if (!std::isfinite(sum)) return false;
    }
    return true;
  }

  std::filesystem::path folder_;
  detail::Loaded parts_;
  std::vector<const char*> input_names_, output_names_;
};

}  // namespace xl_export

#endif
