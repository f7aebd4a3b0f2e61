#include "include/xl_export/session.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "loading.hpp"
#include "memory_parts.hpp"

namespace xl_export {
namespace detail {
namespace {

constexpr auto int64_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
               float_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

std::string listed(const std::vector<Named>& tensors) {
  std::string names;
  for (const Named& named : tensors) names += (names.empty() ? "" : ", ") + named.name;
  return names;
}

void refuse_no_language_model(const Spec& spec) {
  if (spec.language_model()) return;
  throw Error(Fault::stream, "this artefact is no language model: its step reads " + listed(spec.inputs) +
                                 " and returns " + listed(spec.outputs) +
                                 "; use step() with arrays by name.");
}

// Throws if a step of `length` tokens in each row does not fit this session or the memory.
void refuse_unfit(const Spec& spec, std::size_t length, const Memory& memory) {
  if (memory.owner() != spec.identity)
    throw Error(Fault::stream, "the memory belongs to artefact " + memory.owner().substr(0, 12) +
                                   " and this session runs " + spec.identity.substr(0, 12) +
                                   "; use memory that this session's start() returned.");
  const auto batch = static_cast<std::size_t>(memory.batch());
  if (memory.positions.size() != batch)
    throw Error(Fault::stream, "the memory has " + std::to_string(memory.positions.size()) +
                                   " positions for " + std::to_string(batch) +
                                   " streams; give one position for each stream.");
  for (const std::int64_t at : memory.positions)
    if (at > detail::furthest_position || at < -detail::furthest_position)
      throw Error(Fault::stream, "a position of the memory is beyond 2^62; set it to 0 to start a new text.");
  if (length < 1 || length > static_cast<std::size_t>(spec.segment))
    throw Error(Fault::stream, "the segment has " + std::to_string(length) +
                                   " tokens; this artefact takes at most " + std::to_string(spec.segment) +
                                   ": feed them in several pieces, or export it with a larger segment.");
  const auto segment = static_cast<std::size_t>(spec.segment);
  const bool any_count = !spec.fixed_tokens.empty();
  if (spec.fixed_rows && (memory.batch() != spec.fixed_rows || (!any_count && length != segment)))
    throw Error(Fault::stream,
                "the step has " + std::to_string(batch) + " rows of " + std::to_string(length) +
                    " tokens, and this artefact was exported for exactly " + std::to_string(spec.fixed_rows) +
                    " rows of " + (any_count ? "1 to " : "") + std::to_string(segment) + "; feed that.");
  const auto broken = [](const char* promise) {
    return std::string("this artefact does not keep the promise `") + promise + "`, ";
  };
  if (spec.without.count("rows") && batch > 1)
    throw Error(Fault::stream, broken("rows") + "so rows would change each other, and the memory has " +
                                   std::to_string(batch) + "; give each stream a memory of its own.");
  for (const std::int64_t at : memory.positions) {
    if (spec.without.count("padding") && at < 0)
      throw Error(Fault::stream, broken("padding") + "and a row is at position " + std::to_string(at) +
                                     "; start each row at position 0.");
    if (spec.without.count("cuts") && at % spec.segment)
      throw Error(Fault::stream, broken("cuts") + "and a row is at position " + std::to_string(at) +
                                     "; a step begins at a multiple of " + std::to_string(spec.segment) +
                                     " tokens: feed whole segments, and a shorter one only at the end.");
  }
}

// The number of tokens of each row; throws where tokens and memory do not fit this session.
std::size_t checked(const Spec& spec, View<std::int64_t> tokens, const Memory& memory) {
  const auto batch = static_cast<std::size_t>(memory.batch());
  if (tokens.size() % batch)
    throw Error(Fault::stream, std::to_string(tokens.size()) + " tokens were given for " +
                                   std::to_string(batch) +
                                   " streams; give every stream the same number of tokens.");
  const std::size_t length = tokens.size() / batch;
  refuse_unfit(spec, length, memory);
  for (const std::int64_t token : tokens)
    if (token < 0 || token >= spec.vocabulary)
      throw Error(Fault::stream, "token " + std::to_string(token) +
                                     " is outside the vocabulary; expected 0 "
                                     "to " +
                                     std::to_string(spec.vocabulary - 1) + ".");
  return length;
}

void refuse_other_size(Span<float> given, std::size_t wanted) {
  if (given.size() != wanted)
    throw Error(Fault::stream, "there is room for " + std::to_string(given.size()) +
                                   " answers; expected room for " + std::to_string(wanted) + ".");
}

// Resizes without keeping the numbers. Fewer free the rest, such as the room for the logits of a long prompt.
void resize_exactly(std::vector<float>& numbers, std::size_t size) {
  if (numbers.size() != size) numbers = std::vector<float>(size);
  numbers.reserve(1);  // ONNX Runtime wants an address, also of nothing
}

// The stream positions of T tokens of each row.
void set_places(std::vector<std::int64_t>& places, const std::vector<std::int64_t>& positions,
                std::size_t length) {
  places.clear();
  for (const std::int64_t first : positions)
    for (std::size_t at = 0; at < length; ++at) places.push_back(first + static_cast<std::int64_t>(at));
}

// Runs the graph once on what is prepared, and on the memory. The memory advances by T tokens.
void run(const Loaded& loaded, Memory& memory, std::int64_t T) {
  MemoryParts& parts = MemoryParts::of(memory);
  Prepared& prepared = parts.prepared;
  parts.clear_restarted_rows(memory.positions);
  prepared.inputs.clear(), prepared.outputs.clear();
  for (const Bound& tensor : prepared.fed) prepared.inputs.push_back(tensor.get());
  for (const auto& state : parts.now) prepared.inputs.push_back(state.value.get());
  for (const Bound& tensor : prepared.returned) prepared.outputs.push_back(tensor.get());
  for (const auto& state : parts.present()) prepared.outputs.push_back(state.value.get());
  const auto shorter = loaded.shorter.find(T);
  OrtSession* session = (shorter == loaded.shorter.end() ? loaded.session : shorter->second).get();
  try {
    ort::check(ort::api().Run(session, nullptr, loaded.input_names.data(), prepared.inputs.data(),
                              prepared.inputs.size(), loaded.output_names.data(), prepared.outputs.size(),
                              prepared.outputs.data()));
  } catch (const ort::Failure& failure) {
    throw Error(Fault::artefact, "ONNX Runtime " + ort::version() + " could not run the step (" +
                                     failure.what() +
                                     "); feed fewer tokens at once where memory was short, and export the "
                                     "artefact again otherwise.");
  }
  parts.advance();
  for (std::int64_t& position : memory.positions) position += T;
}

// The `count` tokens from `at` on of each row of an array [B, T, …].
template <class Number>
std::vector<Number> tokens_of(View<Number> all, std::size_t batch, std::size_t length, std::size_t at,
                              std::size_t count) {
  std::vector<Number> part;
  const std::size_t size = all.size() / (batch * length);
  for (std::size_t row = 0; row < batch; ++row) {
    const View<Number> tokens = all.part((row * length + at) * size, count * size);
    part.insert(part.end(), tokens.begin(), tokens.end());
  }
  return part;
}

// The inverse: puts a part into an array [B, T, …].
template <class Number>
void put_tokens(const std::vector<Number>& part, std::size_t batch, std::size_t length, std::size_t at,
                std::size_t count, Number* all) {
  const std::size_t size = part.size() / (batch * count);
  for (std::size_t row = 0; row < batch; ++row)
    std::copy_n(part.data() + row * count * size, count * size, all + (row * length + at) * size);
}

enum class Wanted { all, last, none };  // tokens after which a selective graph computes a distribution

// A step of a language model.
struct Step {
  View<std::int64_t> tokens, targets;  // no targets: no log-probabilities are wanted
  Wanted wanted;
  float* logits;     // [B, T, V], or of a selective graph only those that are wanted
  float* log_probs;  // [B, T] of a selective graph; null if they are not wanted
};

// Whether the last answer of every row is finite. A value that is not finite and visible makes every later
// answer of its row not a number, so it is enough to look at the last one.
bool ends_finite(const Spec& spec, const Step& step, std::size_t length) {
  const auto size = static_cast<std::size_t>(spec.vocabulary);
  for (std::size_t row = 1; row <= step.tokens.size() / length; ++row) {
    const std::size_t last = row * length - 1;
    if (spec.selective && step.wanted == Wanted::none) {
      if (step.targets.empty() || step.targets[last] < 0 || !std::isfinite(step.log_probs[last]))
        return false;
      continue;
    }
    const std::size_t at = spec.selective && step.wanted == Wanted::last ? row - 1 : last;
    float sum = 0;
    for (std::size_t token = 0; token < size; ++token) sum += step.logits[at * size + token];
    if (!std::isfinite(sum)) return false;
  }
  return true;
}

void advance_in_pieces(const Loaded& loaded, const Step& step, std::size_t length, Memory& memory);

// Feeds `length` tokens of each row, which fit.
void advance(const Loaded& loaded, const Step& step, std::size_t length, Memory& memory) {
  const Spec& spec = loaded.spec;
  const auto B = memory.batch(), T = static_cast<std::int64_t>(length);
  if (spec.tokens_at_once(T) < T) return advance_in_pieces(loaded, step, length, memory);
  MemoryParts& parts = MemoryParts::of(memory);
  Prepared& prepared = parts.prepared;
  prepared.ids.assign(step.tokens.begin(), step.tokens.end());
  set_places(prepared.places, memory.positions, length);
  prepared.fed.resize(spec.selective ? 4 : 2), prepared.returned.resize(spec.selective ? 2 : 1);
  prepared.fed[0].bind(prepared.ids.data(), int64_type, {B, T});
  prepared.fed[1].bind(prepared.places.data(), int64_type, {B, T});
  if (spec.selective) {
    prepared.rows.clear(), prepared.rows.reserve(1);
    for (std::size_t at = 0; at < step.tokens.size(); ++at)
      if (step.wanted == Wanted::all || (step.wanted == Wanted::last && (at + 1) % length == 0))
        prepared.rows.push_back(static_cast<std::int64_t>(at));
    prepared.targets.assign(step.targets.begin(), step.targets.end());
    prepared.targets.resize(step.tokens.size(), -1);
    if (!step.log_probs) resize_exactly(prepared.log_probs, step.tokens.size());
    const auto count = static_cast<std::int64_t>(prepared.rows.size());
    prepared.fed[2].bind(prepared.targets.data(), int64_type, {B, T});
    prepared.fed[3].bind(prepared.rows.data(), int64_type, {count});
    prepared.returned[0].bind(step.logits ? step.logits : &prepared.nothing, float_type,
                              {count, spec.vocabulary});
    prepared.returned[1].bind(step.log_probs ? step.log_probs : prepared.log_probs.data(), float_type,
                              {B, T});
  } else {
    prepared.returned[0].bind(step.logits, float_type, {B, T, spec.vocabulary});
  }
  run(loaded, memory, T);
  if (!spec.ring() || !ends_finite(spec, step, length)) parts.mark_unsure();
}

// The same for a step whose number of tokens has no graph.
void advance_in_pieces(const Loaded& loaded, const Step& step, std::size_t length, Memory& memory) {
  const auto batch = static_cast<std::size_t>(memory.batch());
  const auto size = static_cast<std::size_t>(loaded.spec.vocabulary);
  const bool only_last = loaded.spec.selective && step.wanted != Wanted::all;
  const std::vector<std::int64_t> began = memory.positions;
  for (std::size_t at = 0, count; at < length; at += count) {
    count = static_cast<std::size_t>(loaded.spec.tokens_at_once(static_cast<std::int64_t>(length - at)));
    const auto ids = tokens_of(step.tokens, batch, length, at, count);
    std::vector<std::int64_t> targets;
    if (!step.targets.empty()) targets = tokens_of(step.targets, batch, length, at, count);
    std::vector<float> logits(only_last ? 0 : batch * count * size);
    std::vector<float> log_probs(step.log_probs ? batch * count : 0);
    Step piece = {ids, targets, step.wanted, only_last ? step.logits : logits.data(),
                  step.log_probs ? log_probs.data() : nullptr};
    if (only_last && at + count < length) piece.wanted = Wanted::none;
    try {
      advance(loaded, piece, count, memory);
    } catch (...) {
      if (loaded.spec.ring()) memory.positions = began;  // its slots are written again
      throw;
    }
    if (step.log_probs) put_tokens(log_probs, batch, length, at, count, step.log_probs);
    if (!only_last) put_tokens(logits, batch, length, at, count, step.logits);
  }
}

// A step that is no language model.
void step_by_name(const Loaded& loaded, const Arrays& inputs, Memory& memory, Arrays& outputs);

// The same for a step whose number of tokens has no graph.
void step_in_pieces(const Loaded& loaded, const Arrays& inputs, std::size_t length, Memory& memory,
                    Arrays& outputs) {
  const Spec& spec = loaded.spec;
  const auto batch = static_cast<std::size_t>(memory.batch());
  Arrays part = inputs, found;
  for (std::size_t at = 0, count; at < length; at += count) {
    count = static_cast<std::size_t>(spec.tokens_at_once(static_cast<std::int64_t>(length - at)));
    for (const Named& named : spec.inputs) {
      if (!named.timed) continue;
      const Array& whole = inputs.at(named.name);
      part[named.name].floats = tokens_of<float>(whole.floats, batch, length, at, count);
      part[named.name].integers = tokens_of<std::int64_t>(whole.integers, batch, length, at, count);
    }
    step_by_name(loaded, part, memory, found);
    for (const Named& named : spec.outputs) {
      const Array& answer = found[named.name];
      Array& to = outputs[named.name];
      if (!named.timed) {
        to = answer;
        continue;
      }
      to.shape = answer.shape, to.shape[1] = static_cast<std::int64_t>(length);
      to.floats.resize(answer.floats.size() / count * length);
      to.integers.resize(answer.integers.size() / count * length);
      put_tokens(answer.floats, batch, length, at, count, to.floats.data());
      put_tokens(answer.integers, batch, length, at, count, to.integers.data());
    }
  }
}

// The number of tokens of each row of the inputs; throws where inputs and memory do not fit this session.
std::size_t checked(const Spec& spec, const Arrays& inputs, const Memory& memory) {
  if (spec.language_model())
    throw Error(Fault::stream,
                "this artefact is a language model; use step(), predict() or score() with "
                "its tokens.");
  const auto batch = static_cast<std::size_t>(memory.batch());
  if (inputs.size() != spec.inputs.size())
    throw Error(Fault::stream,
                std::to_string(inputs.size()) + " inputs were given; expected " + listed(spec.inputs) + ".");
  std::size_t length = 0;
  bool known = false;
  for (const Named& named : spec.inputs) {
    const auto found = inputs.find(named.name);
    const std::size_t count = found == inputs.end() ? 0
                              : named.integers      ? found->second.integers.size()
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
        throw Error(Fault::stream, named.name +
                                       " has a number that is not finite, and every later answer of "
                                       "the stream would be NaN; replace it, or leave the step out.");
    if (named.timed) length = values, known = true;
  }
  refuse_unfit(spec, length, memory);
  return length;
}

void step_by_name(const Loaded& loaded, const Arrays& inputs, Memory& memory, Arrays& outputs) {
  const Spec& spec = loaded.spec;
  const std::size_t length = checked(spec, inputs, memory);
  const std::int64_t B = memory.batch(), T = static_cast<std::int64_t>(length);
  if (spec.tokens_at_once(T) < T) return step_in_pieces(loaded, inputs, length, memory, outputs);
  MemoryParts& parts = MemoryParts::of(memory);
  Prepared& prepared = parts.prepared;
  prepared.fed.resize(spec.inputs.size() + 1), prepared.returned.resize(spec.outputs.size());
  const auto bind = [&](Bound& tensor, const Named& named, const Array& array) {
    // The interface takes pointers that are not const, but ONNX Runtime does not write through an input's.
    void* data = named.integers ? static_cast<void*>(const_cast<std::int64_t*>(array.integers.data()))
                                : static_cast<void*>(const_cast<float*>(array.floats.data()));
    const auto type = named.integers ? int64_type : float_type;
    if (named.timed)
      tensor.bind(data, type, {B, T}, named.sizes);
    else
      tensor.bind(data, type, {B}, named.sizes);
  };
  for (std::size_t index = 0; index < spec.inputs.size(); ++index)
    bind(prepared.fed[index], spec.inputs[index], inputs.at(spec.inputs[index].name));
  set_places(prepared.places, memory.positions, length);
  prepared.fed.back().bind(prepared.places.data(), int64_type, {B, T});
  for (std::size_t index = 0; index < spec.outputs.size(); ++index) {
    const Named& named = spec.outputs[index];
    Array& array = outputs[named.name];
    const std::size_t count = static_cast<std::size_t>(named.timed ? B * T : B) * named.value_size();
    array.integers.resize(named.integers ? count : 0);
    array.floats.resize(named.integers ? 0 : count);
    array.shape.assign({B});
    if (named.timed) array.shape.push_back(T);
    array.shape.insert(array.shape.end(), named.sizes.begin(), named.sizes.end());
    bind(prepared.returned[index], named, array);
  }
  run(loaded, memory, T);
  parts.mark_unsure();  // outputs may be ids, or not read the memory
}

}  // namespace
}  // namespace detail

double log_sum_exp(View<float> logits) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - top);
  return top + std::log(sum);
}

Session::Session(std::shared_ptr<const detail::Loaded> parts) : parts_(std::move(parts)) {}

Session Session::open(const std::string& folder, const Options& options) {
  return detail::ort::edge("the session", [&] {
    return Session(std::make_shared<const detail::Loaded>(detail::load(folder, options)));
  });
}

const Spec& Session::spec() const {
  return parts_->spec;
}

const Vocabulary& Session::vocabulary() const {
  detail::refuse_no_language_model(spec());
  return *parts_->vocabulary;
}

const Sampler& Session::sampler() const {
  return parts_->sampler;
}

const std::string& Session::folder() const {
  return parts_->folder;
}

const char* Session::kernel() const {
  return parts_->fused ? "fused" : "standard";
}

Memory Session::start(std::int64_t batch) const {
  if (batch < 1 || batch > detail::most_streams)
    throw Error(Fault::stream, "batch is " + std::to_string(batch) + "; expected 1 to 65536 rows.");
  const double sets = spec().in_place() ? 1 : 2;
  const double bytes = sets * static_cast<double>(batch) * static_cast<double>(spec().row_bytes());
  if (bytes > detail::machine_bytes())
    throw Error(Fault::stream, "the memory of " + std::to_string(batch) +
                                   " streams does not fit into the memory of this machine; use a smaller "
                                   "batch.");
  return detail::ort::edge("the memory of the streams", [&] {
    return detail::MemoryParts::make(spec().state, batch, spec().identity, spec().memory_identity,
                                     spec().in_place());
  });
}

void Session::step(View<std::int64_t> tokens, Memory& memory, Span<float> logits) const {
  detail::in_memory("the step", [&] {
    detail::refuse_no_language_model(spec());
    const std::size_t length = detail::checked(spec(), tokens, memory);
    detail::refuse_other_size(logits, tokens.size() * static_cast<std::size_t>(spec().vocabulary));
    detail::advance(*parts_, {tokens, {}, detail::Wanted::all, logits.data(), nullptr}, length, memory);
  });
}

std::vector<float> Session::step(View<std::int64_t> tokens, Memory& memory) const {
  return detail::in_memory("the step", [&] {
    detail::refuse_no_language_model(spec());
    detail::checked(spec(), tokens, memory);  // before the logits of so many tokens are made room for
    std::vector<float> logits(tokens.size() * static_cast<std::size_t>(spec().vocabulary));
    step(tokens, memory, logits);
    return logits;
  });
}

void Session::predict(View<std::int64_t> tokens, Memory& memory, Span<float> logits) const {
  detail::in_memory("the step", [&] {
    detail::refuse_no_language_model(spec());
    const std::size_t length = detail::checked(spec(), tokens, memory), batch = tokens.size() / length;
    const auto size = static_cast<std::size_t>(spec().vocabulary);
    detail::refuse_other_size(logits, batch * size);
    // A graph that is not selective computes the logits after every token.
    const bool spare = !spec().selective && length > 1;
    std::vector<float>& all = detail::MemoryParts::of(memory).prepared.logits;
    detail::resize_exactly(all, spare ? tokens.size() * size : 0);
    const detail::Step step = {tokens, {}, detail::Wanted::last, spare ? all.data() : logits.data(), nullptr};
    detail::advance(*parts_, step, length, memory);
    for (std::size_t row = 0; spare && row < batch; ++row)
      std::copy_n(all.data() + ((row + 1) * length - 1) * size, size, logits.data() + row * size);
  });
}

std::vector<float> Session::predict(View<std::int64_t> tokens, Memory& memory) const {
  return detail::in_memory("the step", [&] {
    std::vector<float> logits(memory.positions.size() * static_cast<std::size_t>(spec().vocabulary));
    predict(tokens, memory, logits);
    return logits;
  });
}

void Session::score(View<std::int64_t> tokens, View<std::int64_t> targets, Memory& memory,
                    Span<float> log_probs) const {
  if (targets.size() != tokens.size())
    throw Error(Fault::stream, std::to_string(targets.size()) + " targets were given for " +
                                   std::to_string(tokens.size()) + " tokens; give one for each, or -1.");
  for (const std::int64_t target : targets)
    if (target < -1 || target >= spec().vocabulary)
      throw Error(Fault::stream, "target " + std::to_string(target) +
                                     " is outside the vocabulary; expected -1 (not wanted) to " +
                                     std::to_string(spec().vocabulary - 1) + ".");
  detail::in_memory("the step", [&] {
    detail::refuse_no_language_model(spec());
    const std::size_t length = detail::checked(spec(), tokens, memory);
    detail::refuse_other_size(log_probs, tokens.size());
    if (spec().selective) {
      const detail::Step step = {tokens, targets, detail::Wanted::none, nullptr, log_probs.data()};
      return detail::advance(*parts_, step, length, memory);
    }
    const auto size = static_cast<std::size_t>(spec().vocabulary);
    std::vector<float>& all = detail::MemoryParts::of(memory).prepared.logits;
    detail::resize_exactly(all, tokens.size() * size);
    detail::advance(*parts_, {tokens, {}, detail::Wanted::all, all.data(), nullptr}, length, memory);
    for (std::size_t at = 0; at < tokens.size(); ++at) {
      const View<float> row(all.data() + at * size, size);
      const double given =
          targets[at] < 0 ? 0 : row[static_cast<std::size_t>(targets[at])] - log_sum_exp(row);
      log_probs.data()[at] = static_cast<float>(given);
    }
  });
}

std::vector<float> Session::score(View<std::int64_t> tokens, View<std::int64_t> targets,
                                  Memory& memory) const {
  return detail::in_memory("the step", [&] {
    std::vector<float> log_probs(tokens.size());
    score(tokens, targets, memory, log_probs);
    return log_probs;
  });
}

bool Session::feed(View<std::int64_t> tokens, Memory& memory, Span<float> logits,
                   const std::atomic<bool>* cancel) const {
  if (memory.batch() != 1 || tokens.empty())
    throw Error(Fault::stream,
                "a text is fed to one stream and has at least one token; use step() for a batch.");
  const auto segment = static_cast<std::size_t>(spec().segment);
  for (std::size_t at = 0; at < tokens.size(); at += segment) {
    const auto piece = tokens.part(at, std::min(segment, tokens.size() - at));
    const bool more = at + segment < tokens.size();
    if (cancel && *cancel) return false;
    // A large vocabulary's logits are computed only if they are asked for.
    if (!spec().selective || !more) {
      predict(piece, memory, logits);
      continue;
    }
    detail::in_memory("the step", [&] {
      const std::size_t length = detail::checked(spec(), piece, memory);
      detail::advance(*parts_, {piece, {}, detail::Wanted::none, nullptr, nullptr}, length, memory);
    });
  }
  return true;
}

std::vector<float> Session::feed(View<std::int64_t> tokens, Memory& memory) const {
  return detail::in_memory("the step", [&] {
    std::vector<float> logits(static_cast<std::size_t>(spec().vocabulary));
    feed(tokens, memory, logits);
    return logits;
  });
}

void Session::step(const Arrays& inputs, Memory& memory, Arrays& outputs) const {
  detail::in_memory("the step", [&] { detail::step_by_name(*parts_, inputs, memory, outputs); });
}

Arrays Session::step(const Arrays& inputs, Memory& memory) const {
  Arrays outputs;
  step(inputs, memory, outputs);
  return outputs;
}

}  // namespace xl_export
