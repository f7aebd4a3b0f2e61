#include "sha256.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
// Clang 14 has the functions only if all of a file is compiled for processors with the instructions.
#elif defined(__aarch64__) && defined(__linux__) && !defined(__clang__)
#define XL_EXPORT_ARM_SHA2
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

namespace xl_export::detail {
namespace {

using State = std::array<std::uint32_t, 8>;
constexpr std::size_t block_bytes = 64;

// The fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> roots = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t turned(std::uint32_t word, int by) {
  return word >> by | word << (32 - by);
}

void compress_plainly(State& state, const std::uint8_t* block) {
  std::array<std::uint32_t, 64> w{};
  for (std::size_t t = 0; t < 16; ++t)
    w[t] = std::uint32_t{block[4 * t]} << 24 | std::uint32_t{block[4 * t + 1]} << 16 |
           std::uint32_t{block[4 * t + 2]} << 8 | std::uint32_t{block[4 * t + 3]};
  for (std::size_t t = 16; t < 64; ++t) {
    const std::uint32_t low = turned(w[t - 15], 7) ^ turned(w[t - 15], 18) ^ w[t - 15] >> 3;
    const std::uint32_t high = turned(w[t - 2], 17) ^ turned(w[t - 2], 19) ^ w[t - 2] >> 10;
    w[t] = w[t - 16] + low + w[t - 7] + high;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t t = 0; t < 64; ++t) {
    const std::uint32_t first =
        h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + roots[t] + w[t];
    const std::uint32_t second =
        (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += added[i];
}

// Adds whole blocks to a state.
void compress_all_plainly(State& state, const std::uint8_t* bytes, std::size_t blocks) {
  for (; blocks > 0; --blocks, bytes += block_bytes) compress_plainly(state, bytes);
}

// The processor's own instructions are six times as fast: without them, half of the time until the first
// token of a small model would be hashing.
#if defined(__x86_64__)

bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1);
  return sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29);
}

__attribute__((target("sha,sse4.1"))) void compress_all_by_instructions(State& state,
                                                                        const std::uint8_t* bytes,
                                                                        std::size_t blocks) {
  const auto load = [](const void* from) { return static_cast<const __m128i*>(from); };
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(load(&state[0])), 0xb1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(load(&state[4])), 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
  for (; blocks > 0; --blocks, bytes += block_bytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // the last 16 words
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      __m128i& words = w[group % 4];
      if (group < 4) {
        words = _mm_shuffle_epi8(_mm_loadu_si128(load(bytes + 16 * group)), big_endian);
      } else {
        const __m128i last = w[(group + 3) % 4];
        const __m128i seven_before = _mm_alignr_epi8(last, w[(group + 2) % 4], 4);
        words = _mm_add_epi32(_mm_sha256msg1_epu32(words, w[(group + 1) % 4]), seven_before);
        words = _mm_sha256msg2_epu32(words, last);
      }
      const __m128i constants = _mm_loadu_si128(load(&roots[static_cast<std::size_t>(4 * group)]));
      const __m128i sum = _mm_add_epi32(words, constants);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  const auto store = [](void* to) { return static_cast<__m128i*>(to); };
  _mm_storeu_si128(store(&state[0]), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(store(&state[4]), _mm_alignr_epi8(dchg, feba, 8));
}

#elif defined(XL_EXPORT_ARM_SHA2)

bool has_instructions() {
  constexpr auto sha2 = 1u << 6;  // HWCAP_SHA2, which old headers lack
  return getauxval(AT_HWCAP) & sha2;
}

__attribute__((target("+crypto"))) void compress_all_by_instructions(State& state, const std::uint8_t* bytes,
                                                                     std::size_t blocks) {
  uint32x4_t abcd = vld1q_u32(&state[0]), efgh = vld1q_u32(&state[4]);
  for (; blocks > 0; --blocks, bytes += block_bytes) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t w[4];  // the last 16 words
#pragma GCC unroll 16
    for (int group = 0; group < 16; ++group) {
      uint32x4_t& words = w[group % 4];
      if (group < 4)
        words = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(bytes + 16 * group)));
      else
        words = vsha256su1q_u32(vsha256su0q_u32(words, w[(group + 1) % 4]), w[(group + 2) % 4],
                                w[(group + 3) % 4]);
      const uint32x4_t sum = vaddq_u32(words, vld1q_u32(&roots[static_cast<std::size_t>(4 * group)]));
      const uint32x4_t abcd_now = abcd;
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, abcd_now, sum);
    }
    abcd = vaddq_u32(abcd, abcd_before);
    efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(&state[0], abcd);
  vst1q_u32(&state[4], efgh);
}

#else

bool has_instructions() {
  return false;
}

void compress_all_by_instructions(State&, const std::uint8_t*, std::size_t) {}

#endif

void compress_all(State& state, const std::uint8_t* bytes, std::size_t blocks) {
  static const auto compress = has_instructions() ? compress_all_by_instructions : compress_all_plainly;
  compress(state, bytes, blocks);
}

class Sha256 {
 public:
  void add(const void* data, std::size_t size) {
    auto bytes = static_cast<const std::uint8_t*>(data);
    total_ += size;
    if (held_ > 0) {
      const std::size_t taken = std::min(size, block_bytes - held_);
      std::memcpy(block_.data() + held_, bytes, taken);
      held_ += taken, bytes += taken, size -= taken;
      if (held_ < block_bytes) return;
      compress_all(state_, block_.data(), 1);
    }
    compress_all(state_, bytes, size / block_bytes);
    held_ = size % block_bytes;
    if (held_ > 0) std::memcpy(block_.data(), bytes + size - held_, held_);
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
  State state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, block_bytes> block_{};
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
