// Answers operations on an artefact, one line of JSON each (tests/parity/operations.py), with the C++
// library.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "src/file.hpp"
#include "src/json.hpp"
#include "src/loading.hpp"
#include "src/sampling.hpp"
#include "src/spec_file.hpp"
#include "xl_export.hpp"

namespace {

namespace detail = xl_export::detail;
using detail::json::Value;

struct Stream {
  xl_export::Memory memory;
  std::vector<float> last;  // logits [B, V] of the next token; empty if no token has been fed
};

class Driver {
 public:
  std::string answer(const std::string& line) {
    std::string text;
    try {
      asked_ = detail::json::parse(line);
      return answer_operation(asked_.at("op").string());
    } catch (const xl_export::Error& error) {
      detail::json::append_string(text, error.what());
      return "{\"error\": " + text + "}";
    } catch (const std::exception& error) {  // the library promises that there is no other
      detail::json::append_string(text, error.what());
      return "{\"escaped\": " + text + "}";
    }
  }

 private:
  std::string answer_operation(const std::string& op) {
    if (op == "open") return open();
    if (op == "close") return streams_.clear(), sessions_.clear(), session_ = nullptr, "{}";
    if (op == "check") return check();
    if (op == "start") return put(session().start(integer("rows", 1)));
    if (op == "load") return put(xl_export::load(session(), text("file"), asked_.find("adopt") != nullptr));
    if (op == "fork") return fork();
    if (op == "pad") return stream().memory.positions = ids("positions"), positions();
    if (op == "restart")
      return stream().last.clear(), stream().memory.positions.at(size("row")) = 0, positions();
    if (op == "save") return xl_export::save(stream().memory, text("file")), positions();
    if (op == "step") return step();
    if (op == "step by name") return step_by_name();
    if (op == "predict") return predict();
    if (op == "score") return score();
    if (op == "generate") return stream().last.clear(), generate(stream().memory, size("until"));
    if (op == "threads") return threads();
    if (op == "vocabulary") return vocabulary();
    if (op == "encode")
      return "{\"tokens\": " + listed(words().encode(asked_.at("text").string())) +
             ", \"size\": " + std::to_string(words().size()) + "}";
    if (op == "decode") return decode();
    if (op == "draw") return draw();
    if (op == "uniforms") return uniforms();
    if (op == "sampling") return recommended();
    if (op == "in_place") return in_place();
    if (op == "spec") return detail::read_spec(text("folder")), "{}";
    if (op == "json") return detail::json::parse(text("text")), "{}";
    return "{\"lacks\": true}";
  }

  // Sessions stay open when another one is opened; its streams are then on their own.
  std::string open() {
    const std::string folder = text("model"), library = text("fused");
    streams_.clear(), vocabulary_.reset(), session_ = nullptr;
    const std::string name = folder + "|" + library;
    auto found = sessions_.find(name);
    if (found == sessions_.end()) {
      xl_export::Options options;
      options.threads = 1;
      options.fused_library = library;
      if (asked_.find("expected_identity")) options.expected_identity = text("expected_identity");
      if (asked_.find("public_key")) options.public_key = text("public_key");
      found = sessions_.emplace(name, xl_export::Session::open(folder, options)).first;
    }
    session_ = &found->second;
    const xl_export::Spec& spec = session_->spec();
    return "{\"size\": " + std::to_string(spec.vocabulary) +
           ", \"segment\": " + std::to_string(spec.segment) + ", \"kernel\": \"" + session_->kernel() + "\"}";
  }

  std::string check() {
    const xl_export::Report report = xl_export::check(session());
    std::ostringstream out;
    out << "{\"passed\": " << (report.passed() ? "true" : "false") << ", \"tolerance\": " << report.tolerance
        << ", \"mean_tolerance\": " << report.mean_tolerance << "}";
    return out.str();
  }

  std::string fork() {
    xl_export::Memory memory = stream().memory.copy();
    const std::vector<float> last = stream().last;
    streams_.insert_or_assign(text("as"), Stream{std::move(memory), last});
    return "{}";
  }

  std::string step() {
    const auto [tokens, length] = rows();
    const std::vector<float> logits = session().step(tokens, stream().memory);
    const auto size = static_cast<std::size_t>(session().spec().vocabulary);
    stream().last.clear();
    for (std::size_t end = length * size; end <= logits.size(); end += length * size)
      stream().last.insert(stream().last.end(), logits.data() + (end - size), logits.data() + end);
    return positions("\"logits\": " + listed(logits));
  }

  // Of a step that is no language model: `inputs` and the answer have a flat list for each name.
  std::string step_by_name() {
    xl_export::Arrays fed;
    const Value& inputs = asked_.at("inputs");
    for (std::size_t at = 0; at < inputs.keys.size(); ++at)
      for (const Value& number : inputs.items[at].list()) {
        xl_export::Array& array = fed[inputs.keys[at]];
        if (number.text.find_first_of(".e") == std::string::npos)
          array.integers.push_back(number.integer(INT64_MIN, INT64_MAX));
        else
          array.floats.push_back(std::strtof(number.text.c_str(), nullptr));
      }
    std::string outputs, shapes;
    for (const auto& [name, array] : session().step(fed, stream().memory)) {
      const std::string begin = (outputs.empty() ? "\"" : ", \"") + name + "\": ";
      outputs += begin + (array.floats.empty() ? listed(array.integers) : listed(array.floats));
      shapes += begin + listed(array.shape);
    }
    return positions("\"outputs\": {" + outputs + "}, \"shapes\": {" + shapes + "}");
  }

  std::string predict() {
    stream().last = session().predict(rows().first, stream().memory);
    return positions("\"logits\": " + listed(stream().last));
  }

  // log p of every token, fed in segments; that of the first tokens follows from what came before.
  std::string score() {
    const auto [tokens, length] = rows();
    xl_export::Memory& memory = stream().memory;
    const std::size_t batch = static_cast<std::size_t>(memory.batch()),
                      longest = static_cast<std::size_t>(session().spec().segment),
                      size = static_cast<std::size_t>(session().spec().vocabulary);
    std::vector<float> found(batch * length, std::nanf(""));
    for (std::size_t row = 0; row < batch && !stream().last.empty(); ++row) {
      const xl_export::View<float> logits(stream().last.data() + row * size, size);
      found.at(row * length) = static_cast<float>(logits[static_cast<std::size_t>(tokens[row * length])] -
                                                  xl_export::log_sum_exp(logits));
    }
    for (std::size_t at = 0; at < length; at += longest) {
      const std::size_t width = std::min(longest, length - at);
      std::vector<std::int64_t> fed, targets;
      for (std::size_t row = 0; row < batch; ++row)
        for (std::size_t index = at; index < at + width; ++index) {
          fed.push_back(tokens[row * length + index]);
          targets.push_back(index + 1 < length ? tokens[row * length + index + 1] : -1);
        }
      if (at + width == length) {
        xl_export::Memory fork = memory.copy();
        stream().last = session().predict(fed, fork);
      }
      const std::vector<float> scores = session().score(fed, targets, memory);
      for (std::size_t place = 0; place < scores.size(); ++place)
        if (targets[place] >= 0) found[place / width * length + at + place % width + 1] = scores[place];
    }
    return positions("\"log_probs\": " + listed(found));
  }

  // until: the number of tokens after which the caller stops; 0 for never.
  std::string generate(xl_export::Memory& memory, std::size_t until) {
    xl_export::GenerateOptions options;
    options.max_tokens = asked_.at("max_tokens").integer(-9, 1 << 20);
    if (!asked_.find("recommended")) options.sampler = sampler(asked_);
    if (const Value* seed = asked_.find("seed")) options.seed = std::stoull(seed->text);
    options.text = !asked_.find("ids_only");
    if (const Value* stop = asked_.find("stop"))
      for (const Value& each : stop->list()) options.stop.push_back(each.string());
    std::vector<std::int64_t> drawn;
    std::string pieces, whole, ended = "null";
    options.bos = asked_.find("bos");
    // After how many tokens the caller cancels; that is checked before the next one.
    const std::size_t cancelled = asked_.find("cancel") ? size("cancel") : SIZE_MAX;
    std::atomic<bool> cancel{cancelled == 0};
    options.cancel = &cancel;
    const auto each = [&](const xl_export::Piece& piece) {
      const char* reasons[] = {"null", "\"end\"", "\"stop\"", "\"length\""};
      drawn.push_back(piece.token);
      append(pieces, piece.text);
      whole += piece.text;
      ended = reasons[static_cast<int>(piece.ended)];
      cancel = drawn.size() == cancelled;
      return drawn.size() != until;
    };
    const xl_export::Ended why = asked_.find("text")
                                     ? xl_export::generate(session(), memory, text("text"), options, each)
                                     : xl_export::generate(session(), memory, ids("tokens"), options, each);
    if (ended == "null" && why != xl_export::Ended::cancelled) throw std::logic_error("another reason");
    std::string shown;
    append(shown, whole);
    return "{\"tokens\": " + listed(drawn) + ", \"pieces\": [" + pieces + "], \"text\": " + shown +
           ", \"ended\": " + ended + ", \"positions\": " + listed(memory.positions) + "}";
  }

  // What several threads generate at once on one session, each with memory of its own.
  std::string threads() {
    std::vector<std::string> answers(4);
    std::vector<std::thread> running;
    for (std::string& answer : answers)
      running.emplace_back([&] {
        try {
          xl_export::Memory memory = session().start();
          answer = generate(memory, 0);
        } catch (const std::exception& error) {
          append(answer, error.what());
        }
      });
    for (std::thread& thread : running) thread.join();
    std::string list;
    for (const std::string& answer : answers) list += (list.empty() ? "" : ", ") + answer;
    return "{\"answers\": [" + list + "]}";
  }

  std::string vocabulary() {
    std::map<std::string, detail::Bytes> contents;
    for (const char* name : {"vocab.json", "tokenizer.json"})
      if (std::filesystem::exists(text("folder") + "/" + name))
        contents[name] = detail::read_file(text("folder") + "/" + name);
    vocabulary_ = detail::load_vocabulary(text("folder"), contents, size("size"));
    return "{\"size\": " + std::to_string(vocabulary_->size()) + "}";
  }

  std::string decode() {
    const auto decoder = words().decoder();
    std::string pieces;
    for (const std::int64_t token : ids("tokens")) append(pieces, decoder->add(token));
    append(pieces, decoder->rest());
    return "{\"pieces\": [" + pieces + "]}";
  }

  // The token of a case of tests/data/sampling.jsonl.
  std::string draw() {
    std::vector<float> logits;
    for (const Value& logit : asked_.at("logits").list()) logits.push_back(std::stof(logit.text));
    xl_export::History history(static_cast<std::int64_t>(logits.size()));
    for (const std::int64_t token : ids("prompt")) history.add_prompt(token);
    for (const std::int64_t token : ids("generated")) history.add_generated(token);
    const double uniform = std::stod(asked_.at("uniform").text);
    xl_export::Sampler::Scratch scratch;
    return "{\"token\": " +
           std::to_string(sampler(asked_.at("settings"))(logits, history, uniform, scratch)) + "}";
  }

  std::string recommended() {
    const xl_export::Sampler found = detail::read_sampling(text("folder"));
    std::ostringstream out;
    out.precision(17);
    out << "{\"top_k\": " << found.top_k;
    for (const detail::Setting& setting : detail::settings)
      out << ", \"" << setting.name << "\": " << found.*setting.value;
    return out.str() + "}";
  }

  std::string uniforms() {
    xl_export::Random random(std::stoull(asked_.at("seed").text), std::stoull(asked_.at("row").text));
    std::ostringstream out;
    out.precision(17);
    for (int count = 0; count < 8; ++count) out << (count ? ", " : "") << random.next();
    return "{\"uniforms\": [" + out.str() + "]}";
  }

  std::string in_place() {
    xl_export::Spec spec;
    spec.form = text("form"), spec.target = text("target");
    return std::string("{\"in_place\": ") + (spec.in_place() ? "true}" : "false}");
  }

  static xl_export::Sampler sampler(const Value& settings) {
    xl_export::Sampler sampler;
    for (const detail::Setting& setting : detail::settings)
      if (const Value* found = settings.find(setting.name)) sampler.*setting.value = std::stod(found->text);
    if (const Value* found = settings.find("top_k")) sampler.top_k = std::stoll(found->text);
    return sampler;
  }

  const xl_export::Session& session() const {
    if (!session_) throw std::runtime_error("no model is open");
    return *session_;
  }

  const xl_export::Vocabulary& words() const { return vocabulary_ ? *vocabulary_ : session().vocabulary(); }

  Stream& stream() { return streams_.at(text("stream")); }

  std::string put(xl_export::Memory memory) {
    streams_.insert_or_assign(text("stream"), Stream{std::move(memory), {}});
    return positions();
  }

  std::string positions(const std::string& more = "") {
    return "{" + more + (more.empty() ? "" : ", ") + "\"positions\": " + listed(stream().memory.positions) +
           "}";
  }

  // The tokens [B, T] row by row, and T.
  std::pair<std::vector<std::int64_t>, std::size_t> rows() {
    std::vector<std::int64_t> tokens;
    std::size_t length = 0;
    for (const Value& row : asked_.at("tokens").list()) {
      length = row.list().size();
      for (const Value& token : row.list()) tokens.push_back(token.integer(INT64_MIN, INT64_MAX));
    }
    return {tokens, length};
  }

  std::string text(const char* name) const {
    const Value* found = asked_.find(name);
    return found ? found->string() : "";
  }

  std::int64_t integer(const char* name, std::int64_t absent) const {
    const Value* found = asked_.find(name);
    return found ? found->integer(INT64_MIN, INT64_MAX) : absent;
  }

  std::size_t size(const char* name) const { return static_cast<std::size_t>(integer(name, 0)); }

  std::vector<std::int64_t> ids(const char* name) const {
    std::vector<std::int64_t> numbers;
    for (const Value& number : asked_.at(name).list())
      numbers.push_back(number.integer(INT64_MIN, INT64_MAX));
    return numbers;
  }

  static void append(std::string& list, std::string_view text) {
    if (!list.empty()) list += ", ";
    detail::json::append_string(list, text);
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

  Value asked_;
  std::map<std::string, xl_export::Session> sessions_;
  const xl_export::Session* session_ = nullptr;
  std::map<std::string, Stream> streams_;
  std::unique_ptr<xl_export::Vocabulary> vocabulary_;
};

}  // namespace

int main() {
  Driver driver;
  for (std::string line; std::getline(std::cin, line);) std::cout << driver.answer(line) << std::endl;
}
