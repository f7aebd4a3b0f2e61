#include "include/xl_export/generate.hpp"

#include <algorithm>
#include <memory>
#include <utility>

#include "utf8.hpp"

namespace xl_export {
namespace detail {
namespace {

// The text of a stream as it grows. It releases what can no longer be part of a stop string.
class GrowingText {
 public:
  // border: what surrounds each token, and so a stop string; empty if a stop string may be a part of a token.
  GrowingText(std::unique_ptr<Decoder> decoder, const std::vector<std::string>& stop, std::string border)
      : decoder_(std::move(decoder)), border_(std::move(border)) {
    std::size_t longest = 256;
    for (const std::string& text : stop) {
      stop_.push_back(border_ + text + border_);
      longest += stop_.back().size();
    }
    for (std::string* text : {&held_, &whole_, &piece_.text}) text->reserve(longest);
  }

  // The piece of a token, valid until the next one is added.
  const Piece& add(std::int64_t token, bool end, bool last) {
    piece_.token = token;
    if (decoder_ && !end) held_ += decoder_->add(token);
    // A stop string ends the text as soon as it is there, even if a later token could change it.
    whole_ = held_;
    if (decoder_) whole_ += decoder_->rest();
    std::size_t released = whole_.size();
    whole_ += border_;
    std::size_t found = std::string::npos;
    if (!end)
      for (const std::string& stop : stop_) found = std::min(found, whole_.find(stop));
    if (end) {
      piece_.ended = Ended::end;
    } else if (found != std::string::npos) {
      piece_.ended = Ended::stop, released = found;
    } else if (last) {
      piece_.ended = Ended::length;
    } else {
      whole_ = held_;
      whole_ += border_;
      released = held_.size() - overlap();
    }
    piece_.text.assign(whole_, 0, released);
    held_.erase(0, released);
    return piece_;
  }

 private:
  // The length of the longest end of the held text with which a stop string begins.
  std::size_t overlap() const {
    std::size_t longest = 0;
    for (const std::string& text : stop_)
      for (std::size_t length = std::min(text.size() - 1, whole_.size()); length > border_.size(); --length)
        if (whole_.compare(whole_.size() - length, length, text, 0, length) == 0) {
          longest = std::max(longest, length - border_.size());
          break;
        }
    return longest;
  }

  std::unique_ptr<Decoder> decoder_;
  std::string border_, held_, whole_;
  std::vector<std::string> stop_;
  Piece piece_;
};

// A text without the white space at its two ends, as Python's str.strip() has it.
std::string without_blanks(const std::string& text) {
  std::vector<char32_t> codes = characters(text);
  const auto inside = [](char32_t code) { return !is_space(code); };
  codes.erase(std::find_if(codes.rbegin(), codes.rend(), inside).base(), codes.end());
  codes.erase(codes.begin(), std::find_if(codes.begin(), codes.end(), inside));
  std::string out;
  for (const char32_t code : codes) append_utf8(out, code);
  return out;
}

}  // namespace
}  // namespace detail

Ended generate(const Session& session, Memory& memory, View<std::int64_t> prompt,
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
  Sampler::Scratch scratch;
  History history(session.spec().vocabulary);
  for (const std::int64_t token : prompt) history.add_prompt(token);
  std::vector<float> logits(static_cast<std::size_t>(session.spec().vocabulary));
  if (!session.feed(prompt, memory, logits, options.cancel)) return Ended::cancelled;
  for (std::int64_t count = 1;; ++count) {
    if (options.cancel && *options.cancel) return Ended::cancelled;
    const std::int64_t token = sampler(logits, history, random.next(), scratch);
    history.add_generated(token);
    const bool end = token == session.vocabulary().special().end_of_document;
    const Piece& piece = text.add(token, end, count == options.max_tokens);
    if (!each(piece)) return Ended::cancelled;
    session.feed({&token, 1}, memory, logits);
    if (piece.ended != Ended::no) return piece.ended;
  }
}

Ended generate(const Session& session, Memory& memory, std::string_view prompt,
               const GenerateOptions& options, const std::function<bool(const Piece&)>& each) {
  std::vector<std::int64_t> tokens = session.vocabulary().encode(prompt);
  if (options.bos) {
    const std::int64_t first = session.vocabulary().special().before_text();
    if (first < 0)
      throw Error(Fault::option, "bos needs a token before a text, and the " +
                                     std::string(session.vocabulary().kind()) +
                                     " vocabulary of this model has none; leave bos out.");
    tokens.insert(tokens.begin(), first);
  }
  return generate(session, memory, tokens, options, each);
}

}  // namespace xl_export
