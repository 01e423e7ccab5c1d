// How fast a GPU reads and writes scattered pieces of memory: random units of 32 to 1024 bytes, in ascending
// order, each a given share of all. No arithmetic, no indices but one for each unit. What a sparse step cannot beat.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 bench/probes/scattered_access.cu -o scattered_access && ./scattered_access
//
// Prints gigabytes a second of useful bytes; `part` writes 2 bytes of each 32-byte sector, as a step on single bf16
// weights does, and counts the whole unit as read and written.
#include <cuda_runtime.h>
#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int64_t kBytes = int64_t{1} << 32;
constexpr int kThreads = 256, kTogether = 4, kRounds = 7;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// splitmix64
struct Chosen {
  uint32_t threshold;
  __host__ __device__ bool operator()(int64_t unit) const {
    uint64_t z = static_cast<uint64_t>(unit) + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<uint32_t>(z ^ (z >> 31)) <= threshold;
  }
};

enum class Access { kRead, kWrite, kReadWrite, kReadWritePart };

// Lanes threads move one unit, 16 bytes each.
template <int Lanes, Access Kind>
__global__ void __launch_bounds__(kThreads) touch(uint4* memory, const int* units, int64_t n_units, unsigned* sink) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kTogether + threadIdx.x;
  uint4* at[kTogether];
  uint4 held[kTogether];
  bool active[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    const int64_t thread = first + j * kThreads, unit = thread / Lanes;
    active[j] = unit < n_units;
    if (active[j]) at[j] = memory + static_cast<int64_t>(units[unit]) * Lanes + thread % Lanes;
  }
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    if (!active[j]) continue;
    held[j] = Kind == Access::kWrite ? make_uint4(threadIdx.x, j, 0, 0) : *at[j];
  }
  if (Kind == Access::kRead) {
    unsigned sum = 0;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (active[j]) sum += held[j].x ^ held[j].y ^ held[j].z ^ held[j].w;
    }
    if (sum == 0x12345678u) *sink = sum;
    return;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
    if (!active[j]) continue;
    if (Kind == Access::kReadWritePart) {
      if (threadIdx.x % 2 == 0) *reinterpret_cast<uint16_t*>(at[j]) = static_cast<uint16_t>(held[j].x + 1);
    } else {
      held[j].x ^= 1;
      *at[j] = held[j];
    }
  }
}

template <int Lanes, Access Kind>
double gigabytes_per_second(uint4* memory, const int* units, int64_t n_units, unsigned* sink) {
  const int64_t per_block = kThreads * kTogether;
  const auto blocks = static_cast<unsigned>((n_units * Lanes + per_block - 1) / per_block);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < kRounds; ++round) {
    check(cudaEventRecord(begin));
    touch<Lanes, Kind><<<blocks, kThreads>>>(memory, units, n_units, sink);
    check(cudaGetLastError());
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  const double ways = Kind == Access::kReadWrite || Kind == Access::kReadWritePart ? 2 : 1;
  return ways * static_cast<double>(n_units) * Lanes * 16 / (1e6 * times[kRounds / 2]);
}

template <int Lanes>
void row(uint4* memory, double share, unsigned* sink) {
  const int64_t all = kBytes / (16 * Lanes);
  thrust::device_vector<int> units(static_cast<size_t>(1.01 * share * static_cast<double>(all)) + 1000);
  const auto end = thrust::copy_if(thrust::counting_iterator<int64_t>(0), thrust::counting_iterator<int64_t>(all),
                                   units.begin(), Chosen{static_cast<uint32_t>(share * 4294967295.0)});
  const int64_t n = end - units.begin();
  const int* list = thrust::raw_pointer_cast(units.data());
  std::printf("%5d B  %4.1f %%  %8.0f %8.0f %12.0f %8.0f\n", 16 * Lanes, 100 * share,
              gigabytes_per_second<Lanes, Access::kRead>(memory, list, n, sink),
              gigabytes_per_second<Lanes, Access::kWrite>(memory, list, n, sink),
              gigabytes_per_second<Lanes, Access::kReadWrite>(memory, list, n, sink),
              gigabytes_per_second<Lanes, Access::kReadWritePart>(memory, list, n, sink));
}

}  // namespace

int main() {
  uint4* memory = nullptr;
  unsigned* sink = nullptr;
  check(cudaMalloc(&memory, kBytes));
  check(cudaMalloc(&sink, sizeof(unsigned)));
  check(cudaMemset(memory, 1, kBytes));
  std::printf("   unit  share      read    write   read+write     part\n");
  for (const double share : {0.025, 0.15, 0.33, 0.56, 0.81, 1.0}) {
    row<2>(memory, share, sink);
    row<4>(memory, share, sink);
    row<8>(memory, share, sink);
    row<16>(memory, share, sink);
    row<64>(memory, share, sink);
  }
  return 0;
}
