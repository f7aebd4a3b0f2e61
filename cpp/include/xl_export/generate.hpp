// Generating text of one stream. Every token costs the same, however long the text becomes.
#ifndef XL_EXPORT_GENERATE_HPP
#define XL_EXPORT_GENERATE_HPP

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
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

// Continues a stream after a prompt of token ids, and calls `each` with every token as soon as it is drawn.
// At the end the memory has seen all tokens that were given to `each`. Where `each` returns false, generation
// stops, and the last token is left to be fed.
void generate(const Session& session, Memory& memory, View<std::int64_t> prompt,
              const GenerateOptions& options, const std::function<bool(const Piece&)>& each);

}  // namespace xl_export

#endif
