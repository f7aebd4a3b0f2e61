// The element types of memory tensors. A new type is a row here, and its numbers in conversion.hpp.
#ifndef XL_EXPORT_ELEMENT_TYPES_HPP
#define XL_EXPORT_ELEMENT_TYPES_HPP

#include <onnxruntime_c_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "include/xl_export/spec.hpp"
#include "json.hpp"

namespace xl_export {

namespace detail {

struct ElementFacts {
  ElementType type;
  const char* name;                // in spec.json
  const char* stored;              // in safetensors files
  ONNXTensorElementDataType onnx;  // in graphs
  std::size_t num_bytes;           // of one number
  std::uint32_t exponent;          // the bits that are all set in a number that is not finite; 0 if there is none
  bool scaled;                     // whether each vector has a scale, in a tensor of its own
};

// In the order of the enumeration.
inline constexpr ElementFacts element_types[] = {
    {ElementType::float32, "float32", "F32", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, 4, 0x7f800000, false},
    {ElementType::float16, "float16", "F16", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, 2, 0x7c00, false},
    {ElementType::int8, "int8", "I8", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, 1, 0, true},
};

inline constexpr const ElementFacts& facts_of(ElementType type) {
  return element_types[static_cast<std::size_t>(type)];
}

// The type with a name of spec.json.
inline const ElementFacts& element_type(const std::string& name) {
  for (const ElementFacts& facts : element_types)
    if (name == facts.name) return facts;
  throw json::Value::wrong(name + " is no type of a memory");
}

}  // namespace detail
}  // namespace xl_export

#endif
