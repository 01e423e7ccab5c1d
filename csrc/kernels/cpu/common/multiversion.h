// A function marked with this is compiled for AVX-512, AVX2 and the baseline, and the machine's best is taken when the
// library is loaded (glibc's ifunc). Elsewhere the compiler's own target is all there is.
#pragma once

#include <cstddef>  // where glibc says that it is there

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define SPARSE_OPT_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SPARSE_OPT_MULTIVERSION
#endif

// Defined where the compiler can make what is written for AVX-512 alone.
#if defined(__x86_64__) && defined(__GNUC__)
#define SPARSE_OPT_AVX512
#endif

namespace sparse_opt::cpu {

// Whether that may run: the machine has AVX-512, and torch's ATEN_CPU_CAPABILITY does not ask for less.
bool has_avx512();

}  // namespace sparse_opt::cpu
