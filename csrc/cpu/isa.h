// The instruction sets of the machine this runs on, and those the compiler was allowed to use.
#pragma once

#include <atomic>
#include <cstdlib>
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
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return text;
  text += " avx2";
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return text;
  }
  text += " avx512";
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

// Code that the kernels have one version each of, best last; a folder beside this file holds what a level needs beyond
// the one below.
enum class IsaLevel { kPlain, kAvx2, kAvx512, kAvx512Bf16 };

// "plain", "avx2", "avx512", "avx512_bf16"; the best of the machine for null or another name, and never a better one.
inline IsaLevel isa_level_named(const char* name) {
  const std::string found = " " + cpu_isa() + " ", wanted = name ? name : "";
  IsaLevel level = IsaLevel::kPlain;
  if (wanted == "plain" || found.find(" avx2 ") == std::string::npos) return level;
  level = IsaLevel::kAvx2;
  if (wanted == "avx2" || found.find(" avx512 ") == std::string::npos) return level;
  level = IsaLevel::kAvx512;
  if (wanted == "avx512" || found.find(" avx512_bf16 ") == std::string::npos) return level;
  return IsaLevel::kAvx512Bf16;
}

// The level that kernels run at: the machine's, or what SPECDEC_CPU_ISA limits it to.
inline std::atomic<IsaLevel>& isa_level() {
  static std::atomic<IsaLevel> level{isa_level_named(std::getenv("SPECDEC_CPU_ISA"))};
  return level;
}

inline void limit_isa(const std::string& name) { isa_level() = isa_level_named(name.c_str()); }

}  // namespace specdec
