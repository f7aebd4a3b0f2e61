// All variants of the fused operator in one library or program: the fastest one that this processor runs is registered.
//
// Each variant is `library.cpp`, compiled with flags of its own. CMake writes `variants.inc` from variants.json, the
// fastest variant last: VARIANT(avx2, has.ssse3 && has.avx2 && …)
#include "vendor/onnxruntime/onnxruntime_c_api.h"
#include "xl_export_fused.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#ifndef HWCAP2_I8MM  // headers before Linux 5.6, as in Ubuntu 20.04 and JetPack 5
#define HWCAP2_I8MM (1 << 13)
#endif
#else
#include <cpuid.h>
#endif

#define VARIANT(name, runs) extern "C" OrtStatus* xl_export_register_##name(OrtSessionOptions*, const OrtApiBase*);
#include "variants.inc"
#undef VARIANT

namespace {

/// The features of this processor that the operating system lets programs use, by its names for them.
#if defined(__aarch64__)
struct Features {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const bool asimd = first & HWCAP_ASIMD, crc32 = first & HWCAP_CRC32, atomics = first & HWCAP_ATOMICS,
             asimdrdm = first & HWCAP_ASIMDRDM, asimddp = first & HWCAP_ASIMDDP, i8mm = second & HWCAP2_I8MM;
};
#else
struct Features {
  const bool ssse3 = __builtin_cpu_supports("ssse3"), sse4_1 = __builtin_cpu_supports("sse4.1"),
             sse4_2 = __builtin_cpu_supports("sse4.2"), popcnt = __builtin_cpu_supports("popcnt"),
             avx = __builtin_cpu_supports("avx"), avx2 = __builtin_cpu_supports("avx2"),
             fma = __builtin_cpu_supports("fma"), f16c = avx && has_f16c(),
             avx512f = __builtin_cpu_supports("avx512f"), avx512bw = __builtin_cpu_supports("avx512bw"),
             avx512cd = __builtin_cpu_supports("avx512cd"), avx512dq = __builtin_cpu_supports("avx512dq"),
             avx512vl = __builtin_cpu_supports("avx512vl");

  static bool has_f16c() {  // which older compilers do not know by name
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  }
};
#endif

struct Variant {
  const char* name = nullptr;
  OrtStatus* (*register_operators)(OrtSessionOptions*, const OrtApiBase*) = nullptr;
};

const Variant& chosen() {
  static const Variant variant = [] {
    const Features has;
    Variant fastest;
#define VARIANT(name, runs) \
  if (runs) fastest = {#name, xl_export_register_##name};
#include "variants.inc"
#undef VARIANT
    return fastest;
  }();
  return variant;
}

}  // namespace

const char* xl_export_fused_variant(void) { return chosen().name; }

OrtStatus* xl_export_fused_register(OrtSessionOptions* options, const OrtApiBase* base) {
  if (chosen().name) return chosen().register_operators(options, base);
  return base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, "the fused operator does not run on this processor");
}

#ifdef XL_EXPORT_FUSED_SHARED
/// The function that ONNX Runtime looks up in a library of custom operators.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const OrtApiBase* base) {
  return xl_export_fused_register(options, base);
}
#endif
