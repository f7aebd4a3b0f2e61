// ONNX Runtime's C interface with owners for its objects and exceptions for its errors.
#ifndef XL_EXPORT_ORT_HPP
#define XL_EXPORT_ORT_HPP

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "limits.hpp"

namespace xl_export::detail::ort {

// An error of ONNX Runtime, the first line of its message. Callers say in their own sentence what failed.
class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string version();

// The functions of the interface of version `ORT_API_VERSION`, which every newer library offers too.
const OrtApi& api();

// Runs work in which memory may run out or ONNX Runtime may fail, and makes both an Error.
template <class Work>
auto edge(const char* what, Work work) {
  try {
    return in_memory(what, work);
  } catch (const Failure& failure) {
    throw Error(Fault::option, std::string(what) + " could not be made by ONNX Runtime (" + failure.what() +
                                   "); use a smaller batch.");
  }
}

void check(OrtStatus* status);

struct Release {
  void operator()(OrtSession* it) const { api().ReleaseSession(it); }
  void operator()(OrtSessionOptions* it) const { api().ReleaseSessionOptions(it); }
  void operator()(OrtValue* it) const { api().ReleaseValue(it); }
  void operator()(OrtMemoryInfo* it) const { api().ReleaseMemoryInfo(it); }
  void operator()(OrtTypeInfo* it) const { api().ReleaseTypeInfo(it); }
  void operator()(OrtCUDAProviderOptionsV2* it) const { api().ReleaseCUDAProviderOptions(it); }
};

template <class T>
using Owned = std::unique_ptr<T, Release>;
using Value = Owned<OrtValue>;

// What `make` writes to its last argument, owned.
template <class T, class Make, class... Arguments>
Owned<T> made(Make make, Arguments... arguments) {
  T* object = nullptr;
  check(make(arguments..., &object));
  return Owned<T>(object);
}

// The environment of the process. It is never released: threads of sessions may outlive other static objects.
const OrtEnv* environment();

// A tensor over numbers that it does not own, and that must not move. type: one of `element_types`, or int64.
Value tensor(void* data, const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type);

// Name, type and sizes of an input or output of a graph; a size is -1 where it varies.
struct Signature {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<std::int64_t> sizes;

  bool operator==(const Signature& other) const {
    return name == other.name && type == other.type && sizes == other.sizes;
  }
};

Signature signature(const OrtSession* session, std::size_t index, bool input);

}  // namespace xl_export::detail::ort

#endif
