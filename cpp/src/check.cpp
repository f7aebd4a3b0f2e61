#include "include/xl_export/check.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "fields.hpp"
#include "file.hpp"
#include "json.hpp"
#include "limits.hpp"
#include "spec_file.hpp"
#include "utf8.hpp"

namespace xl_export {
namespace detail {
namespace {

// The numbers of one tensor, [rows, values, …].
struct StoredArray {
  Array array;
  std::size_t values = 0;  // of each row
};

// Inputs, how they are fed, and the right answers to them.
struct Reference {
  std::size_t rows = 0, count = 0;                // B, and N: the tokens that are fed to each row
  std::vector<std::size_t> segments;              // how many tokens each step takes
  std::vector<std::vector<bool>> restarts;        // [steps][B]: rows that start a new stream
  std::vector<std::vector<std::int64_t>> tokens;  // [B][N + 1] of a language model
  std::map<std::string, StoredArray> arrays;      // the answers, and the inputs of any other step
};

// The array of a tensor [rows, values, …]. least, most: of the values of each row; 0 if there is no such
// axis.
StoredArray read_array(const json::Value* stored, const Named& named, const Bytes& content, std::size_t rows,
                       std::size_t least, std::size_t most) {
  const auto refuse = [&](bool holds) {
    if (holds) throw json::Value::wrong(shown(named.name) + " has another type or shape than its tensor");
  };
  refuse(!stored || stored->at("dtype").text != (named.integers ? "int64" : "float32"));
  std::vector<std::int64_t> shape;
  for (const json::Value& size : stored->at("shape").items) shape.push_back(size.integer());
  std::vector<std::int64_t> wanted = {static_cast<std::int64_t>(rows)};
  refuse(most && shape.size() < 2);
  if (most) wanted.push_back(shape[1]);
  wanted.insert(wanted.end(), named.sizes.begin(), named.sizes.end());
  StoredArray found;
  found.values = most ? static_cast<std::size_t>(shape[1]) : 1;
  refuse(shape != wanted || (most && (found.values < least || found.values > most)));
  const auto offset = static_cast<std::size_t>(stored->at("offset").integer());
  const std::size_t each = named.integers ? 8 : 4;
  double numbers = 1;  // perhaps more than any integer
  for (const std::int64_t size : shape) numbers *= static_cast<double>(size);
  if (offset > content.size() || numbers > static_cast<double>((content.size() - offset) / each))
    throw json::Value::wrong(shown(named.name) + " does not fit into reference.bin");
  const auto count = static_cast<std::size_t>(numbers);
  found.array.integers.resize(named.integers ? count : 0);
  found.array.floats.resize(named.integers ? 0 : count);
  void* target = named.integers ? static_cast<void*>(found.array.integers.data()) : found.array.floats.data();
  std::memcpy(target, content.data() + offset, each * count);
  return found;
}

// The tokens of a language model, and its log-probabilities of each next token and of all after the last one.
void read_tokens(Reference& reference, const json::Value& document, const Spec& spec, const Bytes& content) {
  for (const json::Value& row : document.at("tokens").items) {
    reference.tokens.emplace_back();
    for (const json::Value& token : row.items)
      reference.tokens.back().push_back(token.integer(0, spec.vocabulary - 1));
    if (reference.tokens.back().size() != reference.count + 1)
      throw json::Value::wrong("its segments do not fit its tokens");
  }
  if (reference.tokens.size() != reference.rows)
    throw json::Value::wrong("its restarts are not one for each row");
  Named log_probs, last;
  log_probs.name = "log_probs", last.name = "last", last.sizes = {spec.vocabulary};
  for (const Named* named : {&log_probs, &last}) {
    const std::size_t values = named == &last ? 0 : reference.count;
    StoredArray answers =
        read_array(&document.at(named->name), *named, content, reference.rows, values, values);
    // -inf is the answer for a token that cannot occur, as in a padded vocabulary.
    for (const float number : answers.array.floats)
      if (!(number < INFINITY)) throw json::Value::wrong("one of its answers is not a log-probability");
    reference.arrays[named->name] = std::move(answers);
  }
}

// The inputs and outputs of any other step. Inputs may repeat.
void read_outputs(Reference& reference, const json::Value& document, const Spec& spec, const Bytes& content) {
  for (const auto* side : {&spec.inputs, &spec.outputs}) {
    const bool fed = side == &spec.inputs;
    const json::Value& stored = document.at(fed ? "inputs" : "outputs");
    if (stored.keys.size() != side->size())
      throw json::Value::wrong("its inputs or outputs are not the step's");
    for (const Named& named : *side) {
      const std::size_t most = named.timed ? reference.count : fed ? 0 : reference.segments.size();
      const std::size_t least = named.timed && fed ? 1 : most;
      reference.arrays[named.name] =
          read_array(stored.find(named.name), named, content, reference.rows, least, most);
    }
  }
}

Reference read_reference(const Session& session) {
  const Spec& spec = session.spec();
  const std::filesystem::path path = std::filesystem::path(session.folder()) / "reference.json";
  const Bytes text = read_verified(path, spec.files.at("reference.json"));
  const Bytes content = read_verified(path.parent_path() / "reference.bin", spec.files.at("reference.bin"));
  return naming(path, [&] {
    json::Value document = json::parse(as_text(text));
    verify_fields(spec.language_model() ? "reference" : "step_reference", document);
    Reference reference;
    for (const json::Value& segment : document.at("segments").items) {
      reference.segments.push_back(static_cast<std::size_t>(segment.integer(1, spec.segment)));
      reference.count += reference.segments.back();
    }
    for (const json::Value& step : document.at("restarts").items) {
      reference.restarts.emplace_back();
      for (const json::Value& restart : step.items) reference.restarts.back().push_back(restart.boolean());
      reference.rows = reference.restarts.front().size();
      if (reference.restarts.back().size() != reference.rows || reference.rows == 0)
        throw json::Value::wrong("its restarts are not one for each row");
    }
    if (reference.restarts.size() != reference.segments.size() || reference.segments.empty())
      throw json::Value::wrong("its segments do not fit its restarts");
    (spec.language_model() ? read_tokens : read_outputs)(reference, document, spec, content);
    return reference;
  });
}

// Collects differences from the right answers.
class Differences {
 public:
  void add(double mine, double right, double unit = 1) {
    const double difference = mine == right ? 0 : std::abs(mine - right) / unit;  // both may be -inf
    if (std::isnan(difference) || difference > largest_) largest_ = difference;
    sum_ += difference, ++count_;
  }

  Report report(const Spec& spec, std::size_t tokens) const {
    Report report;
    report.max_difference = largest_;
    report.tolerance = spec.tolerance;
    report.mean_difference = sum_ / static_cast<double>(count_);
    report.mean_tolerance = spec.mean_tolerance;
    report.tokens = static_cast<std::int64_t>(tokens);
    return report;
  }

 private:
  double largest_ = 0, sum_ = 0;
  std::size_t count_ = 0;
};

// Feeds the tokens of one step, from `at` on, to a language model. The last step is fed twice: it is scored,
// then predicted from.
void compare_tokens(const Session& session, const Reference& reference, std::size_t step, std::size_t at,
                    Memory& memory, Differences& found) {
  const std::size_t length = reference.segments[step];
  std::vector<std::int64_t> tokens, targets;
  for (const std::vector<std::int64_t>& row : reference.tokens) {
    const auto first = row.begin() + static_cast<std::ptrdiff_t>(at);
    tokens.insert(tokens.end(), first, first + static_cast<std::ptrdiff_t>(length));
    targets.insert(targets.end(), first + 1, first + 1 + static_cast<std::ptrdiff_t>(length));
  }
  std::optional<Memory> before;
  if (step + 1 == reference.segments.size()) before = memory.copy();
  const std::vector<float> scores = session.score(tokens, targets, memory);
  const std::vector<float>& right = reference.arrays.at("log_probs").array.floats;
  for (std::size_t row = 0; row < reference.rows; ++row)
    for (std::size_t index = 0; index < length; ++index)
      found.add(scores[row * length + index], right[row * reference.count + at + index]);
  if (!before) return;
  const std::vector<float> logits = session.predict(tokens, *before);
  const std::vector<float>& last = reference.arrays.at("last").array.floats;
  const std::size_t vocabulary = last.size() / reference.rows;
  for (std::size_t first = 0; first < last.size(); first += vocabulary) {
    const double total = log_sum_exp({logits.data() + first, vocabulary});
    for (std::size_t token = first; token < first + vocabulary; ++token)
      found.add(static_cast<float>(logits[token] - total), last[token]);
  }
}

// Some values of each row, from `at` on; the values of a row repeat.
Array part_of(const StoredArray& stored, const Named& named, std::size_t rows, std::size_t at,
              std::size_t length) {
  Array part;
  const std::size_t size = named.value_size();
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t index = at; index < at + length; ++index) {
      const auto first = static_cast<std::ptrdiff_t>((row * stored.values + index % stored.values) * size);
      const auto last = first + static_cast<std::ptrdiff_t>(size);
      const auto append = [&](auto& to, const auto& from) {
        to.insert(to.end(), from.begin() + first, from.begin() + last);
      };
      if (named.integers)
        append(part.integers, stored.array.integers);
      else
        append(part.floats, stored.array.floats);
    }
  return part;
}

// What differences from an output are relative to: 1, and in a lower precision, whose limits are wide, the
// root mean square of the output if that is smaller.
double scale_of(const Spec& spec, const Array& output) {
  double squares = 0;
  for (const float number : output.floats) squares += static_cast<double>(number) * number;
  if (!spec.lossy() || squares == 0) return 1;
  return std::min(1.0, std::sqrt(squares / static_cast<double>(output.floats.size())));
}

// The same for a step that is no language model: its outputs are compared.
void compare_outputs(const Session& session, const Reference& reference, std::size_t step, std::size_t at,
                     Memory& memory, Differences& found) {
  const auto part = [&](const Named& named, std::size_t number) {
    const std::size_t length = named.timed ? reference.segments[step] : 1;
    return part_of(reference.arrays.at(named.name), named, reference.rows, named.timed ? at : number, length);
  };
  Arrays fed;
  for (const Named& named : session.spec().inputs) fed[named.name] = part(named, 0);
  const Arrays outputs = session.step(fed, memory);
  for (const Named& named : session.spec().outputs) {
    const double scale = scale_of(session.spec(), reference.arrays.at(named.name).array);
    const auto compare = [&](const auto& mine, const auto& right) {
      for (std::size_t index = 0; index < right.size(); ++index) {
        const auto wanted = static_cast<double>(right[index]);
        found.add(static_cast<double>(mine[index]), wanted, std::max(scale, std::abs(wanted)));
      }
    };
    if (named.integers && session.spec().lossy()) continue;  // a rounding may change an id to any other
    const Array right = part(named, step);
    compare(outputs.at(named.name).floats, right.floats);
    compare(outputs.at(named.name).integers, right.integers);
  }
}

Report replay(const Session& session) {
  const Reference reference = read_reference(session);
  const auto compare = session.spec().language_model() ? compare_tokens : compare_outputs;
  Differences found;
  Memory memory = session.start(static_cast<std::int64_t>(reference.rows));
  std::size_t at = 0;
  for (std::size_t step = 0; step < reference.segments.size(); ++step) {
    for (std::size_t row = 0; row < reference.rows; ++row)
      if (reference.restarts[step][row]) memory.positions[row] = 0;
    compare(session, reference, step, at, memory, found);
    at += reference.segments[step];
  }
  return found.report(session.spec(), reference.rows * reference.count);
}

}  // namespace
}  // namespace detail

Report check(const Session& session) {
  return detail::in_memory("the check", [&] { return detail::replay(session); });
}

}  // namespace xl_export
