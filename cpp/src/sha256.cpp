#include "sha256.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

namespace xl_export::detail {
namespace {

class Sha256 {
 public:
  void add(const void* data, std::size_t size) {
    auto bytes = static_cast<const std::uint8_t*>(data);
    total_ += size;
    while (size > 0) {
      const std::size_t taken = std::min(size, block_.size() - held_);
      std::memcpy(block_.data() + held_, bytes, taken);
      held_ += taken, bytes += taken, size -= taken;
      if (held_ == block_.size()) {
        compress();
        held_ = 0;
      }
    }
  }

  // The hash in hexadecimal. Nothing may be added afterwards.
  std::string hexadecimal() {
    const std::uint64_t bits = 8 * total_;
    const std::uint8_t mark = 0x80, zero = 0;
    add(&mark, 1);
    while (held_ != 56) add(&zero, 1);
    for (int byte = 7; byte >= 0; --byte) {
      const auto value = static_cast<std::uint8_t>(bits >> (8 * byte));
      add(&value, 1);
    }
    std::string text;
    for (const std::uint32_t word : state_)
      for (int digit = 28; digit >= 0; digit -= 4) text += "0123456789abcdef"[word >> digit & 15];
    return text;
  }

 private:
  static std::uint32_t turned(std::uint32_t word, int by) { return word >> by | word << (32 - by); }

  void compress() {
    // The fractional parts of the cube roots of the first 64 primes.
    static constexpr std::array<std::uint32_t, 64> roots = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    std::array<std::uint32_t, 64> w{};
    for (std::size_t t = 0; t < 16; ++t)
      w[t] = std::uint32_t{block_[4 * t]} << 24 | std::uint32_t{block_[4 * t + 1]} << 16 |
             std::uint32_t{block_[4 * t + 2]} << 8 | std::uint32_t{block_[4 * t + 3]};
    for (std::size_t t = 16; t < 64; ++t) {
      const std::uint32_t low = turned(w[t - 15], 7) ^ turned(w[t - 15], 18) ^ w[t - 15] >> 3;
      const std::uint32_t high = turned(w[t - 2], 17) ^ turned(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = w[t - 16] + low + w[t - 7] + high;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t first =
          h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + roots[t] + w[t];
      const std::uint32_t second =
          (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<std::uint32_t, 8> added = {a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state_[i] += added[i];
  }

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> block_{};
  std::size_t held_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace

std::string sha256(const void* data, std::size_t size) {
  Sha256 hash;
  hash.add(data, size);
  return hash.hexadecimal();
}

}  // namespace xl_export::detail
