#include "multiversion.h"

#include <cstdlib>
#include <cstring>

namespace sparse_opt::cpu {

bool has_avx512() {
#ifdef SPARSE_OPT_AVX512
  static const bool has = [] {
    const char* limit = std::getenv("ATEN_CPU_CAPABILITY");
    const bool less = limit != nullptr && (std::strcmp(limit, "avx2") == 0 || std::strcmp(limit, "default") == 0);
    return !less && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
  }();
  return has;
#else
  return false;
#endif
}

}  // namespace sparse_opt::cpu
