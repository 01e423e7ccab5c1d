#pragma once

#ifdef __CUDACC__
#define SPARSE_OPT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SPARSE_OPT_HOST_DEVICE inline
#endif
