#include "ort.hpp"

#include <cstdlib>

#include "element_types.hpp"
#include "utf8.hpp"

namespace xl_export::detail::ort {

std::string version() {
  return OrtGetApiBase()->GetVersionString();
}

const OrtApi& api() {
  static const OrtApi* const found = OrtGetApiBase()->GetApi(ORT_API_VERSION);
  if (!found)
    throw Error(Fault::option, "ONNX Runtime " + version() +
                                   " is too old; link 1.21 or newer, and 1.25 or newer "
                                   "for ring memory.");
  return *found;
}

void check(OrtStatus* status) {
  if (!status) return;
  const std::string message = api().GetErrorMessage(status);
  api().ReleaseStatus(status);
  throw Failure(shown(message.substr(0, message.find('\n')), 300));
}

const OrtEnv* environment() {
  static OrtEnv* const shared = [] {
    // Releases for Linux report to their maker from 1.29 on, unless this is set; what a user has set stays.
    // setenv is not thread-safe, so a program with other threads must set the variable before they start.
    if (!std::getenv("ORT_DISABLE_TELEMETRY")) setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    OrtEnv* made = nullptr;
    check(api().CreateEnv(ORT_LOGGING_LEVEL_FATAL, "xl-export", &made));
    check(api().DisableTelemetryEvents(made));
    return made;
  }();
  return shared;
}

Value tensor(void* data, const std::vector<std::int64_t>& shape, ONNXTensorElementDataType type) {
  static const Owned<OrtMemoryInfo> on_cpu =
      made<OrtMemoryInfo>(api().CreateCpuMemoryInfo, OrtDeviceAllocator, OrtMemTypeDefault);
  std::size_t num_bytes = sizeof(std::int64_t);
  for (const ElementFacts& facts : element_types)
    if (facts.onnx == type) num_bytes = facts.num_bytes;
  for (const std::int64_t size : shape) num_bytes *= static_cast<std::size_t>(size);
  OrtValue* value = nullptr;
  check(api().CreateTensorWithDataAsOrtValue(on_cpu.get(), data, num_bytes, shape.data(), shape.size(), type,
                                             &value));
  return Value(value);
}

Signature signature(const OrtSession* session, std::size_t index, bool input) {
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
