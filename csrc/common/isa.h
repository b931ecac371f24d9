// What instruction sets this processor has, as far as kernels are compiled for them: each is all
// that the flags of the same name in csrc/kernels.cmake let the compiler use.
#pragma once

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
#endif

}  // namespace clover
