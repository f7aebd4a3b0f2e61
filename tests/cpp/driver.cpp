// Answers questions about artefacts, one line of JSON each: what the tests of the C++ library run.
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "xl_export.hpp"

namespace {

using xl_export::detail::json::Value;

class Driver {
 public:
  // The answer to a question, as JSON.
  std::string answer(const std::string& line) {
    std::string text;
    try {
      question_ = xl_export::detail::json::parse(line);
      return answer_verb(question_.at("do").string());
    } catch (const xl_export::Error& error) {
      xl_export::detail::json::append_string(text, error.what());
      return "{\"error\": " + text + "}";
    } catch (const std::exception& error) {  // the library promises that there is no other
      xl_export::detail::json::append_string(text, error.what());
      return "{\"escaped\": " + text + "}";
    }
  }

 private:
  std::string answer_verb(const std::string& verb) {
    if (verb == "forget") return sessions_.clear(), "{}";
    if (verb == "json") return json();
    if (verb == "draw") return draw();
    if (verb == "in_place") return in_place();
    const xl_export::Session& session = open();
    if (verb == "open") return "{\"kernel\": \"" + std::string(session.kernel()) +
             "\", \"oldest\": " + std::to_string(xl_export::detail::oldest_runtime(session.spec())) + "}";
    if (verb == "check") return check(session);
    if (verb == "encode")
      return "{\"ids\": " + listed(session.vocabulary().encode(question_.at("text").string())) + "}";
    if (verb == "decode") {
      const auto decoder = session.vocabulary().decoder();
      std::string pieces;
      for (const std::int64_t token : ids("ids")) append(pieces, decoder->add(token));
      append(pieces, decoder->rest());
      return "{\"pieces\": [" + pieces + "]}";
    }
    if (verb == "generate") return generate(session);
    if (verb == "steps") return steps(session);
    if (verb == "threads") return threads(session);
    if (verb == "draws") return draws();
    return "{\"error\": \"unknown\"}";
  }

  // Sessions stay open from one question to the next.
  const xl_export::Session& open() {
    const Value* fused = question_.find("fused");
    const std::string folder = question_.at("folder").string(), library = fused ? fused->string() : "";
    const auto found = sessions_.find(folder + "|" + library);
    if (found != sessions_.end()) return found->second;
    xl_export::Options options;
    options.threads = 1;
    options.fused_library = library;
    return sessions_.emplace(folder + "|" + library, xl_export::Session::open(folder, options)).first->second;
  }

  std::string check(const xl_export::Session& session) {
    const xl_export::Report report = xl_export::check(session);
    std::ostringstream out;
    out << "{\"passed\": " << (report.passed() ? "true" : "false") << ", \"tokens\": " << report.tokens
        << ", \"tolerance\": " << report.tolerance << ", \"mean_tolerance\": " << report.mean_tolerance;
    if (report.max_difference == report.max_difference)
      out << ", \"max_difference\": " << report.max_difference;
    out << "}";
    return out.str();
  }

  std::string generate(const xl_export::Session& session) {
    xl_export::GenerateOptions options;
    options.max_tokens = question_.at("tokens").integer(-9, 1 << 20);
    if (!question_.find("recommended")) options.sampler = sampler(question_);
    if (const Value* seed = question_.find("seed")) options.seed = std::stoull(seed->text);
    if (const Value* text = question_.find("text")) options.text = text->boolean();
    if (const Value* stop = question_.find("stop"))
      for (const Value& text : stop->list()) options.stop.push_back(text.string());
    xl_export::Memory memory = started(session);
    std::vector<std::int64_t> drawn;
    const Value* stopped = question_.find("until");  // the number of tokens after which `each` returns false
    const std::size_t until = stopped ? static_cast<std::size_t>(stopped->integer(1, 1 << 20)) : 0;
    std::string pieces;
    int ended = 0;
    const auto keep = [&](const xl_export::Piece& piece) {
      drawn.push_back(piece.token);
      append(pieces, piece.text);
      ended = static_cast<int>(piece.ended);
      return drawn.size() != until;
    };
    const auto prompt =
        question_.find("ids") ? ids("ids") : session.vocabulary().encode(question_.at("prompt").string());
    xl_export::generate(session, memory, prompt, options, keep);
    finish(memory);
    return "{\"ids\": " + listed(drawn) + ", \"pieces\": [" + pieces +
           "], \"ended\": " + std::to_string(ended) + "}";
  }

  // What several threads generate at once on one session, each with a memory of its own.
  std::string threads(const xl_export::Session& session) {
    std::vector<std::string> answers(4);
    std::vector<std::thread> running;
    for (std::string& answer : answers)
      running.emplace_back([&] {
        try {
          answer = generate(session);
        } catch (const std::exception& error) {
          xl_export::detail::json::append_string(answer, error.what());
        }
      });
    for (std::thread& thread : running) thread.join();
    std::string list;
    for (const std::string& answer : answers) list += (list.empty() ? "" : ", ") + answer;
    return "{\"answers\": [" + list + "]}";
  }

  // log p of every token after the first of each row, fed in segments of some lengths, and the last logits.
  std::string steps(const xl_export::Session& session) {
    xl_export::Memory memory = started(session);
    const auto batch = static_cast<std::size_t>(memory.batch());
    const std::vector<std::int64_t> tokens = ids("ids"), lengths = ids("lengths");  // [B, N + 1]
    const std::size_t width = tokens.size() / batch;
    if (question_.find("positions")) memory.positions = ids("positions");
    std::vector<float> all, last;
    std::size_t at = 0;
    const std::int64_t restart = question_.find("restart") ? question_.at("restart").integer(0, 99) : -1;
    for (std::size_t step = 0; step < lengths.size(); ++step) {
      const std::int64_t length = lengths[step];
      if (static_cast<std::int64_t>(step) == restart) memory.positions.assign(batch, 0);
      std::vector<std::int64_t> fed, targets;
      for (std::size_t row = 0; row < batch; ++row)
        for (std::size_t index = at; index < at + static_cast<std::size_t>(length); ++index) {
          fed.push_back(tokens.at(row * width + index));
          targets.push_back(tokens.at(row * width + index + 1));
        }
      xl_export::Memory fork = memory.copy();
      last = session.predict(fed, fork);
      const std::vector<float> whole = session.step(fed, fork = memory.copy());
      const auto size = session.spec().vocabulary;
      const auto alike = [](float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); };
      if (!std::equal(last.end() - size, last.end(), whole.end() - size, alike))
        return "{\"error\": \"step and predict differ\"}";
      const std::vector<float> scores = session.score(fed, targets, memory);
      all.insert(all.end(), scores.begin(), scores.end());
      at += static_cast<std::size_t>(length);
    }
    finish(memory);
    return "{\"scores\": " + listed(all) + ", \"last\": " + listed(last) +
           ", \"positions\": " + listed(memory.positions) + "}";
  }

  // Whether a text is JSON.
  std::string json() {
    xl_export::detail::json::parse(question_.at("text").string());
    return "{}";
  }

  std::string in_place() {
    xl_export::Spec spec;
    spec.form = question_.at("form").string();
    spec.target = question_.at("target").string();
    return std::string("{\"in_place\": ") + (spec.in_place() ? "true}" : "false}");
  }

  static xl_export::Sampler sampler(const Value& settings) {
    const auto number = [&](const char* name, double absent) {
      const Value* found = settings.find(name);
      return found ? std::stod(found->text) : absent;
    };
    return {number("temperature", 1),        static_cast<std::int64_t>(number("top_k", 0)),
            number("top_p", 1),              number("min_p", 0),
            number("repetition_penalty", 1), number("presence_penalty", 0),
            number("frequency_penalty", 0)};
  }

  // The token of a case of tests/data/sampling.jsonl.
  std::string draw() {
    std::vector<float> logits;
    for (const Value& logit : question_.at("logits").list()) logits.push_back(std::stof(logit.text));
    xl_export::History history;
    for (const std::int64_t token : ids("prompt")) history[token] = 0;
    for (const std::int64_t token : ids("generated")) ++history[token];
    const double uniform = std::stod(question_.at("uniform").text);
    const std::int64_t token = sampler(question_.at("settings"))(logits, history, uniform);
    return "{\"token\": " + std::to_string(token) + "}";
  }

  std::string draws() {
    xl_export::Random random(std::stoull(question_.at("seed").text), std::stoull(question_.at("row").text));
    std::string numbers;
    char text[40];
    for (int count = 0; count < 8; ++count) {
      std::snprintf(text, sizeof text, "%s%.17g", count ? ", " : "", random.next());
      numbers += text;
    }
    return "{\"draws\": [" + numbers + "]}";
  }

  xl_export::Memory started(const xl_export::Session& session) {
    if (const Value* path = question_.find("load")) return xl_export::load(session, path->string());
    const Value* batch = question_.find("batch");
    return session.start(batch ? batch->integer(INT64_MIN, INT64_MAX) : 1);
  }

  void finish(const xl_export::Memory& memory) {
    if (const Value* path = question_.find("save")) xl_export::save(memory, path->string());
  }

  std::vector<std::int64_t> ids(const char* name) {
    std::vector<std::int64_t> numbers;
    for (const Value& number : question_.at(name).list())
      numbers.push_back(number.integer(INT64_MIN, INT64_MAX));
    return numbers;
  }

  static void append(std::string& list, const std::string& text) {
    if (!list.empty()) list += ", ";
    xl_export::detail::json::append_string(list, text);
  }

  template <class Number>
  static std::string listed(const std::vector<Number>& numbers) {
    std::ostringstream out;
    out.precision(9);
    for (std::size_t index = 0; index < numbers.size(); ++index) {
      out << (index ? ", " : "");
      if (std::isfinite(static_cast<double>(numbers[index])))
        out << numbers[index];
      else
        out << "null";  // JSON has no other word for it
    }
    return "[" + out.str() + "]";
  }

  Value question_;
  std::map<std::string, xl_export::Session> sessions_;
};

}  // namespace

int main() {
  Driver driver;
  for (std::string line; std::getline(std::cin, line);) std::cout << driver.answer(line) << std::endl;
}
