// Generating text of one stream. Every token costs the same, however long the text becomes.
#ifndef XL_EXPORT_GENERATE_HPP
#define XL_EXPORT_GENERATE_HPP

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sampler.hpp"
#include "session.hpp"

namespace xl_export {

// Why a text ends: a token that ends a document, a stop string, all the tokens that were asked for, or the
// caller's wish.
enum class Ended { no, end, stop, length, cancelled };

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
  bool bos = false;  // begins a prompt that is a text with the token that came before each text in training
  // Setting it, from any thread, ends the text before the next token, or before the next segment of the
  // prompt. A step that is being computed is finished first.
  const std::atomic<bool>* cancel = nullptr;
};

// Continues a stream after a prompt of token ids, and calls `each` with every token as soon as it is drawn; a
// piece is valid during the call. Returns why the text ended.
//
// At the end the memory has seen all tokens that were given to `each`. If `each` returns false, the text is
// cancelled, and the last token is left to be fed. A text that `options.cancel` ended may have seen a part of
// the prompt. In both cases the memory is whole, its position says how many tokens it has seen, and it can be
// continued, saved or started again.
Ended generate(const Session& session, Memory& memory, View<std::int64_t> prompt,
               const GenerateOptions& options, const std::function<bool(const Piece&)>& each);

// The same for a prompt that is a text, in UTF-8.
Ended generate(const Session& session, Memory& memory, std::string_view prompt,
               const GenerateOptions& options, const std::function<bool(const Piece&)>& each);

}  // namespace xl_export

#endif
