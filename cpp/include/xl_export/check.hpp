// The self-test of an artefact: it replays the reference, tokens and the right answers to them.
#ifndef XL_EXPORT_CHECK_HPP
#define XL_EXPORT_CHECK_HPP

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "session.hpp"

namespace xl_export {

// How far every log-probability is from the reference, in nats, and what is let pass.
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

inline Report replay(const Session& session) {
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
