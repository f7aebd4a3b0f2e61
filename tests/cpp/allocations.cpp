// Counts the allocations of steps, but for those that ONNX Runtime makes while it runs a graph:
//
//   allocations ARTEFACT
//
// A line for each operation: its name, and how often the second to the twentieth step allocated.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <cstdio>
#include <cstring>

#include "xl_export.hpp"

namespace {

thread_local bool counting = false;
thread_local long allocations = 0;

const OrtApi* original = nullptr;

OrtStatus* ORT_API_CALL run(OrtSession* session, const OrtRunOptions* options, const char* const* input_names,
                            const OrtValue* const* inputs, size_t fed, const char* const* output_names,
                            size_t returned, OrtValue** outputs) noexcept {
  const bool before = counting;
  counting = false;
  OrtStatus* status =
      original->Run(session, options, input_names, inputs, fed, output_names, returned, outputs);
  counting = before;
  return status;
}

const OrtApiBase* real_base() {
  // Nothing refers to the library, since this program has the one function of it that is called.
  static const auto get = reinterpret_cast<const OrtApiBase* (*)()>(
      dlsym(dlopen("libonnxruntime.so.1", RTLD_NOW), "OrtGetApiBase"));
  return get();
}

const OrtApi* ORT_API_CALL get_api(uint32_t version) noexcept {
  static OrtApi replaced;
  original = real_base()->GetApi(version);
  std::memcpy(static_cast<void*>(&replaced), original, sizeof replaced);
  replaced.Run = run;
  return &replaced;
}

const char* ORT_API_CALL get_version() noexcept {
  return real_base()->GetVersionString();
}

}  // namespace

// The program's own functions take the place of those of glibc and of ONNX Runtime.
extern "C" {

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  allocations += counting;
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  allocations += counting;
  return __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) {
  allocations += counting;
  return __libc_realloc(old, size);
}
void* aligned_alloc(size_t alignment, size_t size) {
  allocations += counting;
  return __libc_memalign(alignment, size);
}

const OrtApiBase* ORT_API_CALL OrtGetApiBase() noexcept {
  static const OrtApiBase base = {get_api, get_version};
  return &base;
}

}  // extern "C"

namespace {

constexpr int steps = 20;

// Counts the allocations of all steps but the first.
template <class Step>
void count(const char* name, Step step) {
  step();
  allocations = 0, counting = true;
  for (int at = 1; at < steps; ++at) step();
  counting = false;
  std::printf("%s %ld\n", name, allocations);
}

void count_language_model(const xl_export::Session& session) {
  auto memory = session.start();
  std::vector<std::int64_t> tokens = {1}, next = {2};
  std::vector<float> logits(static_cast<std::size_t>(session.spec().vocabulary)), log_probs(1);
  count("predict", [&] { session.predict(tokens, memory, logits); });
  count("step", [&] { session.step(tokens, memory, logits); });
  count("score", [&] { session.score(tokens, next, memory, log_probs); });
  count("logits made anew", [&] { session.predict(tokens, memory); });
  tokens.assign(4, 1);
  count("predict after four tokens", [&] { session.predict(tokens, memory, logits); });

  xl_export::GenerateOptions options;
  options.max_tokens = steps;
  options.stop = {"no such text", "nor this"};
  options.sampler = {2, session.spec().vocabulary - 1, 0.9, 0.001, 1.1, 0.1, 0.1};
  int drawn = 0;
  tokens.resize(2);
  xl_export::generate(session, memory, tokens, options, [&](const xl_export::Piece&) {
    if (++drawn == 2) allocations = 0, counting = true;  // the first token after the prompt was fed
    return true;
  });
  counting = false;
  std::printf("generate %ld\n", drawn == steps ? allocations : -1);
}

void count_named(const xl_export::Session& session) {
  auto memory = session.start();
  xl_export::Arrays inputs, outputs;
  for (const auto& named : session.spec().inputs) {
    inputs[named.name].floats.resize(named.integers ? 0 : named.value_size());
    inputs[named.name].integers.resize(named.integers ? named.value_size() : 0);
  }
  count("named", [&] { session.step(inputs, memory, outputs); });
  count("outputs made anew", [&] { session.step(inputs, memory); });
}

}  // namespace

int main(int, char** arguments) {
  xl_export::Options options;
  options.threads = 1;
  const auto session = xl_export::Session::open(arguments[1], options);
  session.spec().language_model() ? count_language_model(session) : count_named(session);
}
