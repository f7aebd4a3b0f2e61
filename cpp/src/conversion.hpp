// Memory tensors in another precision, for streams that continue in an artefact of another precision.
#ifndef XL_EXPORT_CONVERSION_HPP
#define XL_EXPORT_CONVERSION_HPP

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "include/xl_export/error.hpp"
#include "element_types.hpp"

namespace xl_export {
namespace detail {

inline float from_half(std::uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float size = exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                              : std::ldexp(static_cast<float>(mantissa), -24);
  return half & 0x8000 ? -size : size;
}

// The nearest float16 of a finite number, and the even one of two that are equally near.
inline std::uint16_t to_half(float x) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  int exponent = -13;                     // of the numbers below the normal ones, and of 0
  if (x != 0) std::frexp(x, &exponent);  // 2^(exponent - 1) <= |x|
  exponent = std::max(exponent, -13);
  // In units of the last place; a sum that carries runs over into the exponent, as it should.
  const float units = std::nearbyint(std::ldexp(std::fabs(x), 11 - exponent));
  const int bits = (exponent + 13) * 1024 + static_cast<int>(units);
  if (exponent > 16 || bits >= 31 * 1024)
    throw Error(Fault::stream,
                "the stream holds numbers beyond 65504, the largest in fp16; continue it in an artefact with "
                "memory in fp32.");
  return static_cast<std::uint16_t>(sign | bits);
}

// Number i of a tensor.
inline float number_at(const std::uint8_t* numbers, std::size_t i, ElementType type) {
  const auto read = [&](auto number) {
    std::memcpy(&number, numbers + i * sizeof number, sizeof number);
    return number;
  };
  switch (type) {
    case ElementType::float16: return from_half(read(std::uint16_t{}));
    case ElementType::int8: return read(std::int8_t{});
    case ElementType::float32: break;
  }
  return read(float{});
}

inline void set_number(std::uint8_t* numbers, std::size_t i, ElementType type, float x) {
  const auto write = [&](auto number) { std::memcpy(numbers + i * sizeof number, &number, sizeof number); };
  switch (type) {
    case ElementType::float16: return write(to_half(x));
    case ElementType::int8: return write(static_cast<std::int8_t>(x));
    case ElementType::float32: break;
  }
  write(x);
}

// Numbers of a memory tensor as a file has them, with a scale for each vector if they are bytes.
struct StoredTensor {
  ElementType type = ElementType::float32;
  const std::uint8_t *numbers = nullptr, *scales = nullptr;
};

// Writes `vectors` vectors of `width` numbers in another type, and the `scales` of a type that has them.
inline void convert(const StoredTensor& from, std::size_t vectors, std::size_t width, ElementType type,
                    std::uint8_t* to, std::uint8_t* scales) {
  if (from.type == type) {
    std::memcpy(to, from.numbers, vectors * width * facts_of(type).num_bytes);
    if (scales) std::memcpy(scales, from.scales, vectors * sizeof(float));
    return;
  }
  std::vector<float> x(width);
  for (std::size_t vector = 0; vector < vectors; ++vector) {
    const std::uint8_t* stored = from.numbers + vector * width * facts_of(from.type).num_bytes;
    float scale = 1;
    if (from.scales) std::memcpy(&scale, from.scales + vector * sizeof scale, sizeof scale);
    for (std::size_t i = 0; i < width; ++i) x[i] = scale * number_at(stored, i, from.type);
    if (facts_of(type).scaled) {  // the rule by which graphs write such memory
      float largest = 0;
      for (const float each : x) largest = std::max(largest, std::fabs(each));
      scale = largest / 127;
      std::memcpy(scales + vector * sizeof scale, &scale, sizeof scale);
      for (float& each : x) each = std::clamp(std::nearbyint(each / (scale > 0 ? scale : 1)), -127.0f, 127.0f);
    }
    std::uint8_t* out = to + vector * width * facts_of(type).num_bytes;
    for (std::size_t i = 0; i < width; ++i) set_number(out, i, type, x[i]);
  }
}

}  // namespace detail
}  // namespace xl_export

#endif
