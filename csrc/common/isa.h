// What instruction sets this processor has, as far as kernels are compiled for them: each is all
// that the flags of the same name in csrc/kernels.cmake let the compiler use.
#pragma once

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace clover {

#if defined(__x86_64__) || defined(__i386__)
inline bool cpu_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

inline bool cpu_has_avx512() {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

inline bool cpu_has_avx512bf16() {
  return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}

// Products of tiles of bfloat16. Linux gives a process the registers for them when it asks.
inline bool cpu_has_amx() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  constexpr unsigned kTiles = 1u << 24, kBFloat16 = 1u << 22;
  unsigned eax, ebx, ecx, edx;
  return cpu_has_avx512bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
         (edx & kTiles) && (edx & kBFloat16) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace clover
