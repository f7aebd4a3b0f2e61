// Attention of one head: a single query, or a block of them.
#pragma once

#include "block.hpp"
#include "token.hpp"

namespace xl {

/// Writes the answers of queries first … first + count - 1 of one head.
template <class Stored>
inline void attend(const Head<Stored>& head, const Rule& rule, int64_t first, int64_t count,
                   Scratch& scratch) {
  // A step of one token has a path of its own for common head widths, with the width known at compile time.
  if (head.length == 1 && head.width % LANES == 0) switch (head.width / LANES) {
      case 1: return attend_token<1>(head, rule, scratch);
      case 2: return attend_token<2>(head, rule, scratch);
      case 3: return attend_token<3>(head, rule, scratch);
      case 4: return attend_token<4>(head, rule, scratch);
      case 8: return attend_token<8>(head, rule, scratch);
      case 16: return attend_token<16>(head, rule, scratch);
    }
  Block<Stored>(head, rule, first, count, scratch).run();
}

}  // namespace xl
