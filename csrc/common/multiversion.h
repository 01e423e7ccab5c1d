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
