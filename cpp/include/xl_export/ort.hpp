// ONNX Runtime's C interface with owners for its objects and exceptions for its errors.
#ifndef XL_EXPORT_ORT_HPP
#define XL_EXPORT_ORT_HPP

#include <onnxruntime_c_api.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "utf8.hpp"

namespace xl_export::detail::ort {

// An error of ONNX Runtime, the first line of its message. Callers say in their own sentence what failed.
class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string version() {
  return OrtGetApiBase()->GetVersionString();
}

// The functions of the interface of version `ORT_API_VERSION`, which every newer library offers too.
inline const OrtApi& api() {
  static const OrtApi* const found = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (!found)
    throw Error(Fault::option, "ONNX Runtime " + version() +
                                   " is too old; link 1.21 or newer, and 1.25 or newer "
                                   "for ring memory.");
  return *found;
}

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

inline void check(OrtStatus* status) {
  if (!status) return;
  const std::string message = api().GetErrorMessage(status);
  api().ReleaseStatus(status);
  throw Failure(shown(message.substr(0, message.find('\n')), 300));
}

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
inline const OrtEnv* environment() {
  static OrtEnv* const shared = [] {
    // Releases for Linux report to their maker from 1.29 on, unless this is set; what a user has set stays.
    // Setting a variable is no matter for several threads, so a program that has others sets it beforehand.
    if (!std::getenv("ORT_DISABLE_TELEMETRY")) setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    OrtEnv* made = nullptr;
    check(api().CreateEnv(ORT_LOGGING_LEVEL_FATAL, "xl-export", &made));
    check(api().DisableTelemetryEvents(made));
    return made;
  }();
  return shared;
}

// A tensor over numbers that somebody else owns and keeps where they are.
inline Value tensor(void* data, std::size_t num_bytes, const std::vector<std::int64_t>& shape,
                    ONNXTensorElementDataType type) {
  static const Owned<OrtMemoryInfo> on_cpu =
      made<OrtMemoryInfo>(api().CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeDefault);
  OrtValue* value = nullptr;
  check(api().CreateTensorWithDataAsOrtValue(on_cpu.get(), data, num_bytes, shape.data(), shape.size(), type,
                                             &value));
  return Value(value);
}

inline Value tensor(std::vector<std::int64_t>& numbers, const std::vector<std::int64_t>& shape) {
  return tensor(numbers.data(), sizeof(std::int64_t) * numbers.size(), shape,
                ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
}

inline Value tensor(std::vector<float>& numbers, const std::vector<std::int64_t>& shape) {
  return tensor(numbers.data(), sizeof(float) * numbers.size(), shape, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
}

// Name, type and sizes of an input or output of a graph; a size is -1 where it varies.
struct Signature {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  std::vector<std::int64_t> sizes;

  bool operator==(const Signature& other) const {
    return name == other.name && type == other.type && sizes == other.sizes;
  }
};

inline Signature signature(const OrtSession* session, std::size_t index, bool input) {
  OrtAllocator* allocator = nullptr;
  check(api().GetAllocatorWithDefaultOptions(&allocator));
  char* name = nullptr;
  check(input ? api().SessionGetInputName(session, index, allocator, &name)
              : api().SessionGetOutputName(session, index, allocator, &name));
  Signature found;
  found.name = name;
  check(api().AllocatorFree(allocator, name));
  const auto type = made<OrtTypeInfo>(input ? api().SessionGetInputTypeInfo : api().SessionGetOutputTypeInfo,
                                      session, index);
  const OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api().CastTypeInfoToTensorInfo(type.get(), &info));
  if (!info) return found;  // a sequence or a map, which no tensor of a spec is like
  check(api().GetTensorElementType(info, &found.type));
  std::size_t axes = 0;
  check(api().GetDimensionsCount(info, &axes));
  found.sizes.resize(axes);
  check(api().GetDimensions(info, found.sizes.data(), axes));
  return found;
}

}  // namespace xl_export::detail::ort

#endif
