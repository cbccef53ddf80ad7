// The instruction sets of the machine this runs on, and those the compiler was allowed to use.
#pragma once

#include <string>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace specdec {

// Found at run time, best last: for example "sse2 avx2 avx512 avx512_bf16" or "neon sve bf16".
inline std::string cpu_isa() {
#if defined(__x86_64__)
  std::string text = "sse2";
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) text += " avx2";
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    text += " avx512";
  }
  if (__builtin_cpu_supports("avx512bf16")) text += " avx512_bf16";
  return text;
#elif defined(__aarch64__) && defined(__linux__)
  std::string text = "neon";
  if (getauxval(AT_HWCAP) & HWCAP_SVE) text += " sve";
#ifdef HWCAP2_BF16
  if (getauxval(AT_HWCAP2) & HWCAP2_BF16) text += " bf16";
#endif
  return text;
#elif defined(__aarch64__)
  return "neon";
#else
  return "unknown";
#endif
}

inline std::string compiled_isa() {
#if defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__)
  return "avx2";
#elif defined(__x86_64__)
  return "sse2";
#elif defined(__aarch64__)
  return "neon";
#else
  return "unknown";
#endif
}

}  // namespace specdec
