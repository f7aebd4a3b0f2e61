// Generating text of one stream. Every token costs the same, however long the text becomes.
#ifndef XL_EXPORT_GENERATE_HPP
#define XL_EXPORT_GENERATE_HPP

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sampler.hpp"
#include "session.hpp"

namespace xl_export {

// Why a text ends: a token that ends a document, a stop string, or all the tokens that were asked for.
enum class Ended { no, end, stop, length };

// One generated token. text: what it adds; text that may become a stop string is held back until that is
// decided. ended: with the last token, why the text ends.
struct Piece {
  std::int64_t token = 0;
  std::string text;
  Ended ended = Ended::no;
};

struct GenerateOptions {
  std::int64_t max_tokens = 256;
  std::optional<Sampler> sampler;  // by default the model's own, session.sampler()
  std::uint64_t seed = 0;
  std::vector<std::string> stop;  // strings that end the text and are no part of it
  bool text = true;               // false leaves the text of all pieces empty
};

namespace detail {

// The text of a stream as it grows. It releases what can no longer be part of a stop string.
class GrowingText {
 public:
  // border: what surrounds each token, and so a stop string; empty if a stop string may be a part of a token.
  GrowingText(std::unique_ptr<Decoder> decoder, const std::vector<std::string>& stop, std::string border)
      : decoder_(std::move(decoder)), border_(std::move(border)) {
    for (const std::string& text : stop) stop_.push_back(border_ + text + border_);
  }

  Piece finish(std::int64_t token) { return {token, held_ + rest(), Ended::end}; }

  Piece add(std::int64_t token, bool last) {
    if (decoder_) held_ += decoder_->add(token);
    // A stop string ends the text as soon as it is there, even if a later token could change it.
    const std::string text = held_ + rest(), whole = text + border_;
    std::size_t found = std::string::npos;
    for (const std::string& stop : stop_) found = std::min(found, whole.find(stop));
    if (found != std::string::npos) return {token, text.substr(0, found), Ended::stop};
    if (last) return {token, text, Ended::length};
    const std::size_t released = held_.size() - overlap(held_ + border_);
    Piece piece = {token, held_.substr(0, released), Ended::no};
    held_.erase(0, released);
    return piece;
  }

 private:
  std::string rest() const { return decoder_ ? decoder_->rest() : std::string(); }

  // The length of the longest end of the held text with which a stop string begins.
  std::size_t overlap(const std::string& whole) const {
    std::size_t longest = 0;
    for (const std::string& text : stop_)
      for (std::size_t length = std::min(text.size() - 1, whole.size()); length > border_.size(); --length)
        if (whole.compare(whole.size() - length, length, text, 0, length) == 0) {
          longest = std::max(longest, length - border_.size());
          break;
        }
    return longest;
  }

  std::unique_ptr<Decoder> decoder_;
  std::string border_, held_;
  std::vector<std::string> stop_;
};

// A text without the white space at its two ends, as Python's str.strip() has it.
inline std::string without_blanks(const std::string& text) {
  std::vector<char32_t> codes = characters(text);
  const auto inside = [](char32_t code) { return !is_space(code); };
  codes.erase(std::find_if(codes.rbegin(), codes.rend(), inside).base(), codes.end());
  codes.erase(codes.begin(), std::find_if(codes.begin(), codes.end(), inside));
  std::string out;
  for (const char32_t code : codes) append_utf8(out, code);
  return out;
}

}  // namespace detail

// Continues a stream after a prompt of token ids, and calls `each` with every token as soon as it is drawn.
// At the end the memory has seen all tokens that were given to `each`. Where `each` returns false, generation
// stops, and the last token is left to be fed.
inline void generate(const Session& session, Memory& memory, View<std::int64_t> prompt,
                     const GenerateOptions& options, const std::function<bool(const Piece&)>& each) {
  const Sampler sampler = options.sampler.value_or(session.sampler());
  sampler.verify();
  if (options.max_tokens < 1)
    throw Error(Fault::option,
                "max_tokens is " + std::to_string(options.max_tokens) + "; expected at least 1.");
  const bool ids = session.vocabulary().kind() == "ids";  // a stop string is whole tokens there
  if (prompt.empty()) throw Error(Fault::text, "the prompt has no tokens; give at least one.");
  for (const std::int64_t token : prompt)  // before anything is fed, and so before the memory changes
    if (token < 0 || token >= session.spec().vocabulary)
      throw Error(Fault::text, "the prompt has the token " + std::to_string(token) +
                                   ", outside the vocabulary of this model (0 to " +
                                   std::to_string(session.spec().vocabulary - 1) +
                                   "); give ids of this model.");
  std::vector<std::string> stop = options.stop;
  for (std::string& text : stop) {
    if (ids) text = detail::without_blanks(text);
    if (text.empty())
      throw Error(Fault::option, "a stop string is empty; give at least one character, or none.");
  }
  if (!stop.empty() && !options.text)
    throw Error(Fault::option,
                "stop strings are searched in the text, which was not asked for; leave one of "
                "them out.");
  auto decoder = options.text ? session.vocabulary().decoder() : nullptr;
  if (decoder)
    for (const std::int64_t token : prompt)
      decoder->add(token);  // so that a word after it begins with a blank
  detail::GrowingText text(std::move(decoder), stop, ids ? " " : "");
  Random random(options.seed);
  History history;
  for (const std::int64_t token : prompt) history[token] = 0;
  std::vector<float> logits = session.feed(prompt, memory);
  for (std::int64_t count = 1; count <= options.max_tokens; ++count) {
    const std::int64_t token = sampler(logits, history, random.next());
    ++history[token];
    const bool end = token == session.vocabulary().special().end_of_document;
    const Piece piece = end ? text.finish(token) : text.add(token, count == options.max_tokens);
    if (!each(piece)) return;
    logits = session.feed(std::vector<std::int64_t>{token}, memory);
    if (piece.ended != Ended::no) return;
  }
}

}  // namespace xl_export

#endif
