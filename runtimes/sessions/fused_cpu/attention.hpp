// Attention of one head: a single query, or a block of them.
#pragma once

#include "block.hpp"
#include "token.hpp"

namespace xl {

/// Writes the answers of queries first … first + count - 1 of one head in several streams (at most MAX_STREAMS).
template <class Stored>
inline void attend(const Head<Stored>* heads, int64_t streams, const Rule& rule, int64_t first, int64_t count,
                   Scratch& scratch) {
  // A step of one token has a path of its own for common head widths, with the width known at compile time.
  if (heads->length == 1 && heads->width % LANES == 0) switch (heads->width / LANES) {
      case 1: return attend_tokens<1>(heads, streams, rule, scratch);
      case 2: return attend_tokens<2>(heads, streams, rule, scratch);
      case 3: return attend_tokens<3>(heads, streams, rule, scratch);
      case 4: return attend_tokens<4>(heads, streams, rule, scratch);
      case 8: return attend_tokens<8>(heads, streams, rule, scratch);
      case 16: return attend_tokens<16>(heads, streams, rule, scratch);
    }
  for (int64_t s = 0; s < streams; ++s) Block<Stored>(heads[s], rule, first, count, scratch).run();
}

}  // namespace xl
