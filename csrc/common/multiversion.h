// A function marked with this is compiled for AVX-512, AVX2 and the baseline, and the best for the machine is chosen
// when the library is loaded (glibc's ifunc). Without glibc, GCC 12 and x86-64 it is compiled for the compiler's target
// only.
#pragma once

#include <cstddef>  // defines __GLIBC__

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define SPARSE_OPT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPARSE_OPT_MULTIVERSION
#endif

// Defined if the compiler can compile functions for AVX-512.
#if defined(__x86_64__) && defined(__GNUC__)
#define SPARSE_OPT_AVX512
#endif

namespace sparse_opt::cpu {

// Whether they may run: the machine has AVX-512, and ATEN_CPU_CAPABILITY, which torch reads too, does not exclude it.
bool has_avx512();

}  // namespace sparse_opt::cpu
