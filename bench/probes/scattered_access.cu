// How fast a GPU reads and writes scattered pieces of memory: random units of 32 to 1024 bytes, in ascending
// order, each a given share of all. No arithmetic, no indices but one for each unit. What a sparse step cannot beat.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 bench/probes/scattered_access.cu -o scattered_access && ./scattered_access
//
// Prints gigabytes a second of useful bytes; `part` writes 2 bytes of each 32-byte sector, as a step on single bf16
// weights does, and counts the whole unit as read and written. `--json` prints the rows as one JSON array, which
// bench/kernels/access_rates.py reads; `--device 1` selects another GPU.
#include <cuda_runtime.h>
#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/iterator/counting_iterator.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kBytes = int64_t{1} << 32;
constexpr int kThreads = 256, kTogether = 4, kRounds = 7;
// Small shares are touched in several passes over the memory, each with other units, until they add up to this share:
// 107 MB, which no L2 holds from one round to the next.
constexpr double kLeastShare = 0.025;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

// splitmix64
struct Chosen {
  uint32_t threshold;
  int pass;
  __host__ __device__ bool operator()(int64_t unit) const {
    uint64_t z = (static_cast<uint64_t>(unit) ^ static_cast<uint64_t>(pass) << 40) + 0x9E3779B97F4A7C15ull;
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

// Gigabytes a second for units of one size, of which a share is touched.
struct Row {
  int unit_bytes;
  double share, read, write, read_write, part;
};

template <int Lanes>
Row measure(uint4* memory, double share, unsigned* sink) {
  const int64_t all = kBytes / (16 * Lanes);
  const int passes = std::max(1, static_cast<int>(std::lround(kLeastShare / share)));
  const auto most_of_a_pass = static_cast<size_t>(1.01 * share * static_cast<double>(all)) + 1000;
  thrust::device_vector<int> units(passes * most_of_a_pass);
  auto end = units.begin();
  for (int pass = 0; pass < passes; ++pass) {
    end = thrust::copy_if(thrust::counting_iterator<int64_t>(0), thrust::counting_iterator<int64_t>(all), end,
                          Chosen{static_cast<uint32_t>(share * 4294967295.0), pass});
  }
  const int64_t n = end - units.begin();
  const int* list = thrust::raw_pointer_cast(units.data());
  return {16 * Lanes,
          static_cast<double>(n) / (static_cast<double>(all) * passes),
          gigabytes_per_second<Lanes, Access::kRead>(memory, list, n, sink),
          gigabytes_per_second<Lanes, Access::kWrite>(memory, list, n, sink),
          gigabytes_per_second<Lanes, Access::kReadWrite>(memory, list, n, sink),
          gigabytes_per_second<Lanes, Access::kReadWritePart>(memory, list, n, sink)};
}

void print_table(const std::vector<Row>& rows) {
  std::printf("   unit   share      read    write   read+write     part\n");
  for (const Row& row : rows) {
    std::printf("%5d B  %5.2f %%  %8.0f %8.0f %12.0f %8.0f\n", row.unit_bytes, 100 * row.share, row.read, row.write,
                row.read_write, row.part);
  }
}

void print_json(const std::vector<Row>& rows) {
  const char* separator = "[";
  for (const Row& row : rows) {
    std::printf(
        "%s\n{\"unit_bytes\": %d, \"share\": %.6f, \"read_gb_per_s\": %.1f, \"write_gb_per_s\": %.1f, "
        "\"read_write_gb_per_s\": %.1f, \"part_gb_per_s\": %.1f}",
        separator, row.unit_bytes, row.share, row.read, row.write, row.read_write, row.part);
    separator = ",";
  }
  std::printf("\n]\n");
}

}  // namespace

int main(int argc, char** argv) {
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) {
      json = true;
    } else if (std::strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
      check(cudaSetDevice(std::atoi(argv[++i])));
    } else {
      std::fprintf(stderr, "%s: found %s, expected --json or --device N\n", argv[0], argv[i]);
      return 2;
    }
  }
  uint4* memory = nullptr;
  unsigned* sink = nullptr;
  check(cudaMalloc(&memory, kBytes));
  check(cudaMalloc(&sink, sizeof(unsigned)));
  check(cudaMemset(memory, 1, kBytes));
  std::vector<Row> rows;
  for (const double share : {0.0025, 0.01, 0.025, 0.15, 0.33, 0.56, 0.81, 1.0}) {
    rows.push_back(measure<2>(memory, share, sink));
    rows.push_back(measure<4>(memory, share, sink));
    rows.push_back(measure<8>(memory, share, sink));
    rows.push_back(measure<16>(memory, share, sink));
    rows.push_back(measure<64>(memory, share, sink));
  }
  json ? print_json(rows) : print_table(rows);
  return 0;
}
