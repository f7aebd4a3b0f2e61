// The self-test of an artefact: it replays the reference, tokens and the right answers to them.
#ifndef XL_EXPORT_CHECK_HPP
#define XL_EXPORT_CHECK_HPP

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "session.hpp"

namespace xl_export {

// How far every log-probability is from the reference, in nats, and what is let pass. Of a step that is no
// language model: how far every output is, absolute up to 1 and relative above.
struct Report {
  double max_difference = 0, tolerance = 0, mean_difference = 0, mean_tolerance = 0;
  std::int64_t tokens = 0;
  // The mean of differences with a NaN is NaN, which is within no tolerance.
  bool passed() const { return max_difference <= tolerance && mean_difference <= mean_tolerance; }
};

namespace detail {

struct Reference {
  std::size_t batch = 0, length = 0;
  std::vector<std::vector<std::int64_t>> tokens;  // [B][N + 1]
  std::vector<std::size_t> segments;              // how many tokens each step takes
  std::vector<std::vector<bool>> restarts;        // [steps][B]: rows that start a new text
  std::vector<float> log_probs, last;             // [B, N] and [B, V]
};

inline std::vector<float> read_answers(const json::Value& stored, const Bytes& content, std::size_t rows,
                                       std::size_t columns) {
  if (stored.at("file").string() != "reference.bin" || stored.at("dtype").string() != "float32")
    throw json::Value::wrong("its answers are not float32 numbers of reference.bin");
  const auto& shape = stored.at("shape").list();
  const auto most = static_cast<std::int64_t>(content.size());
  const auto offset = static_cast<std::size_t>(stored.at("offset").integer(0, most));
  if (shape.size() != 2 || shape[0].integer(0, most) != static_cast<std::int64_t>(rows) ||
      shape[1].integer(0, most) != static_cast<std::int64_t>(columns) ||
      rows * columns > (content.size() - offset) / sizeof(float))
    throw json::Value::wrong("its answers have another shape than its tokens");
  std::vector<float> numbers(rows * columns);
  std::memcpy(numbers.data(), content.data() + offset, sizeof(float) * numbers.size());
  for (const float number : numbers)  // -inf is the answer for a token that cannot occur, as in a padded vocabulary
    if (!(number < INFINITY)) throw json::Value::wrong("one of its answers is not a log-probability");
  return numbers;
}

inline Reference read_reference(const Session& session) {
  const Spec& spec = session.spec();
  const std::filesystem::path path = session.folder() / "reference.json";
  const Bytes text = read_verified(path, spec.files.at("reference.json"));
  const Bytes answers = read_verified(session.folder() / "reference.bin", spec.files.at("reference.bin"));
  return naming(path, [&] {
    const json::Value document = json::parse(as_text(text));
    Reference reference;
    for (const json::Value& row : document.at("tokens").list()) {
      reference.tokens.emplace_back();
      for (const json::Value& token : row.list())
        reference.tokens.back().push_back(token.integer(0, spec.vocabulary - 1));
      if (reference.tokens.back().size() != reference.tokens.front().size() ||
          reference.tokens.back().size() < 2)
        throw json::Value::wrong("its rows of tokens have not one length");
    }
    reference.batch = reference.tokens.size();
    if (reference.batch == 0) throw json::Value::wrong("it has no tokens");
    std::size_t fed = 0;
    for (const json::Value& segment : document.at("segments").list()) {
      reference.segments.push_back(static_cast<std::size_t>(segment.integer(1, spec.segment)));
      fed += reference.segments.back();
    }
    for (const json::Value& step : document.at("restarts").list()) {
      reference.restarts.emplace_back();
      for (const json::Value& restart : step.list()) reference.restarts.back().push_back(restart.boolean());
      if (reference.restarts.back().size() != reference.batch)
        throw json::Value::wrong("its restarts are not one for each row");
    }
    reference.length = reference.tokens.front().size() - 1;
    if (fed != reference.length || reference.restarts.size() != reference.segments.size())
      throw json::Value::wrong("its segments do not fit its tokens");
    const auto vocabulary = static_cast<std::size_t>(spec.vocabulary);
    reference.log_probs = read_answers(document.at("log_probs"), answers, reference.batch, reference.length);
    reference.last = read_answers(document.at("last"), answers, reference.batch, vocabulary);
    return reference;
  });
}

// The numbers of one tensor of a step that is no language model, [rows, …], and how many values each row has.
struct StoredArray {
  Array array;
  std::size_t values = 0;
};

inline StoredArray read_array(const json::Value& stored, const Named& named, const Bytes& content,
                              std::size_t rows) {
  const char* type = named.integers ? "int64" : "float32";
  if (stored.at("file").string() != "reference.bin" || stored.at("dtype").string() != type)
    throw json::Value::wrong(shown(named.name) + " is not " + type + " of reference.bin");
  const auto most = static_cast<std::int64_t>(content.size());
  const auto offset = static_cast<std::size_t>(stored.at("offset").integer(0, most));
  double numbers = 1;
  for (const json::Value& size : stored.at("shape").list())
    numbers *= static_cast<double>(size.integer(0, most));
  const std::size_t each = named.integers ? 8 : 4, room = (content.size() - offset) / each;
  const auto count = numbers <= static_cast<double>(room) ? static_cast<std::size_t>(numbers) : room + 1;
  StoredArray found;
  found.values = count / rows / named.value_size();
  if (count > room || found.values == 0 || count != found.values * rows * named.value_size())
    throw json::Value::wrong(shown(named.name) + " has another shape than its tensor");
  found.array.integers.resize(named.integers ? count : 0);
  found.array.floats.resize(named.integers ? 0 : count);
  void* target = named.integers ? static_cast<void*>(found.array.integers.data()) : found.array.floats.data();
  std::memcpy(target, content.data() + offset, each * count);
  return found;
}

// Some values of each row, from `at` on; the values of a row repeat.
inline Array part_of(const StoredArray& stored, const Named& named, std::size_t rows, std::size_t at,
                     std::size_t length) {
  Array part;
  const std::size_t size = named.value_size();
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t index = at; index < at + length; ++index) {
      const auto first = static_cast<std::ptrdiff_t>((row * stored.values + index % stored.values) * size);
      const auto last = first + static_cast<std::ptrdiff_t>(size);
      const auto& [floats, integers] = stored.array;
      const auto append = [&](auto& to, const auto& from) {
        to.insert(to.end(), from.begin() + first, from.begin() + last);
      };
      if (named.integers) append(part.integers, integers);
      else append(part.floats, floats);
    }
  return part;
}

// Replays the reference of a step that is no language model.
inline Report replay_step(const Session& session) {
  const Spec& spec = session.spec();
  const std::filesystem::path path = session.folder() / "reference.json";
  const Bytes text = read_verified(path, spec.files.at("reference.json"));
  const Bytes content = read_verified(session.folder() / "reference.bin", spec.files.at("reference.bin"));
  std::vector<std::size_t> segments;
  std::vector<std::vector<bool>> restarts;
  std::map<std::string, StoredArray> arrays;
  std::size_t rows = 0, count = 0;
  naming(path, [&] {
    const json::Value document = json::parse(as_text(text));
    for (const json::Value& segment : document.at("segments").list()) {
      segments.push_back(static_cast<std::size_t>(segment.integer(1, spec.segment)));
      count += segments.back();
    }
    for (const json::Value& step : document.at("restarts").list()) {
      restarts.emplace_back();
      for (const json::Value& restart : step.list()) restarts.back().push_back(restart.boolean());
      rows = restarts.front().size();
      if (restarts.back().size() != rows || rows == 0)
        throw json::Value::wrong("its restarts are not one for each row");
    }
    if (restarts.size() != segments.size() || segments.empty())
      throw json::Value::wrong("its segments do not fit its restarts");
    for (const auto* side : {&spec.inputs, &spec.outputs}) {
      const json::Value& stored = document.at(side == &spec.inputs ? "inputs" : "outputs");
      for (const Named& named : *side) {
        const StoredArray array = read_array(stored.at(named.name), named, content, rows);
        const std::size_t wanted = named.timed ? count : side == &spec.inputs ? 1 : segments.size();
        if (side == &spec.inputs && named.timed ? array.values > wanted : array.values != wanted)
          throw json::Value::wrong(shown(named.name) + " has not one value for each token");
        arrays[named.name] = array;
      }
    }
    return 0;
  });
  Report report;
  report.tolerance = spec.tolerance, report.mean_tolerance = spec.mean_tolerance;
  report.tokens = static_cast<std::int64_t>(rows * count);
  double sum = 0;
  std::size_t compared = 0, at = 0;
  const auto compare = [&](const auto& mine, const auto& right) {
    for (std::size_t index = 0; index < right.size(); ++index) {
      const double wanted = static_cast<double>(right[index]);
      const double apart = std::abs(static_cast<double>(mine[index]) - wanted);
      const double difference = apart / std::max(1.0, std::abs(wanted));
      if (std::isnan(difference) || difference > report.max_difference) report.max_difference = difference;
      sum += difference, ++compared;
    }
  };
  Memory memory = session.start(static_cast<std::int64_t>(rows));
  for (std::size_t step = 0; step < segments.size(); ++step) {
    for (std::size_t row = 0; row < rows; ++row)
      if (restarts[step][row]) memory.positions[row] = 0;
    const auto part = [&](const Named& named, std::size_t first) {
      const std::size_t length = named.timed ? segments[step] : 1;
      return part_of(arrays[named.name], named, rows, named.timed ? at : first, length);
    };
    Arrays fed;
    for (const Named& named : spec.inputs) fed[named.name] = part(named, 0);
    const Arrays outputs = session.step(fed, memory);
    for (const Named& named : spec.outputs) {
      const Array& mine = outputs.at(named.name);
      const Array right = part(named, step);
      compare(mine.floats, right.floats);
      compare(mine.integers, right.integers);
    }
    at += segments[step];
  }
  report.mean_difference = sum / static_cast<double>(compared);
  return report;
}

inline Report replay(const Session& session) {
  if (!session.spec().language_model()) return replay_step(session);
  const Reference reference = read_reference(session);
  const auto vocabulary = static_cast<std::size_t>(session.spec().vocabulary);
  Report report;
  report.tolerance = session.spec().tolerance, report.mean_tolerance = session.spec().mean_tolerance;
  double sum = 0;
  std::size_t count = 0;
  const auto compare = [&](float mine, float right) {
    const double difference = mine == right ? 0 : std::abs(static_cast<double>(mine) - right);  // both may be -inf
    if (std::isnan(difference) || difference > report.max_difference) report.max_difference = difference;
    sum += difference, ++count;
  };
  Memory memory = session.start(static_cast<std::int64_t>(reference.batch));
  std::size_t at = 0;
  for (std::size_t step = 0; step < reference.segments.size(); ++step) {
    const std::size_t length = reference.segments[step];
    std::vector<std::int64_t> tokens, targets;
    for (std::size_t row = 0; row < reference.batch; ++row) {
      if (reference.restarts[step][row]) memory.positions[row] = 0;
      const auto first = reference.tokens[row].begin() + static_cast<std::ptrdiff_t>(at);
      tokens.insert(tokens.end(), first, first + static_cast<std::ptrdiff_t>(length));
      targets.insert(targets.end(), first + 1, first + 1 + static_cast<std::ptrdiff_t>(length));
    }
    const bool ends = step + 1 == reference.segments.size();
    std::optional<Memory> before;  // the last segment is fed twice: it is scored, then predicted from
    if (ends) before = memory.copy();
    const std::vector<float> scores = session.score(tokens, targets, memory);
    for (std::size_t row = 0; row < reference.batch; ++row)
      for (std::size_t index = 0; index < length; ++index)
        compare(scores[row * length + index], reference.log_probs[row * reference.length + at + index]);
    at += length;
    if (!ends) continue;
    const std::vector<float> logits = session.predict(tokens, *before);
    for (std::size_t row = 0; row < reference.batch; ++row) {
      const double total = log_sum_exp({logits.data() + row * vocabulary, vocabulary});
      for (std::size_t token = row * vocabulary; token < (row + 1) * vocabulary; ++token)
        compare(static_cast<float>(logits[token] - total), reference.last[token]);
    }
  }
  report.mean_difference = sum / static_cast<double>(count);
  report.tokens = static_cast<std::int64_t>(reference.log_probs.size());
  return report;
}

}  // namespace detail

// Replays the reference of the session's artefact.
inline Report check(const Session& session) {
  return detail::in_memory("the check", [&] { return detail::replay(session); });
}

}  // namespace xl_export

#endif
