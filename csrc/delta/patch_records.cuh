// Shared by the kernels of both levels: the launch over tiles, and the check of a record's place.
#pragma once

#include "patch.h"
#include "whole_tensors.cuh"

namespace sparse_opt::cuda {

// Whether the record of tile `number` has `length` bytes, is aligned to `unit` and is within the records, for any
// values of the offsets.
__device__ __forceinline__ bool has_record(const PatchArguments& args, int64_t number, int64_t length, int unit) {
  const int64_t begin = args.offsets[number], end = args.offsets[number + 1];
  return begin >= 0 && begin <= end && end <= args.record_bytes && begin % unit == 0 && end - begin == length;
}

__device__ __forceinline__ void report_damage(const PatchArguments& args, int64_t number) {
  atomicMin(reinterpret_cast<unsigned long long*>(args.bad_tile), static_cast<unsigned long long>(number));
}

__device__ __forceinline__ uint32_t low_bits(int width) {
  return width >= 32 ? 0xffffffffu : (1u << width) - 1u;
}

// Calls launch(table, number of tiles) with the new tensors, and the old ones as companions; without new tensors the
// old ones are both.
template <typename Launch>
void for_each_tile_table(const PatchArguments& args, Launch launch) {
  for_each_whole_table(args.count, args.new_tensors != nullptr ? args.new_tensors : args.old_tensors, args.old_tensors,
                       args.numels, patch_tile(args.level),
                       [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned tiles) {
                         launch(table, tiles);
                         check_launch("patch");
                       });
}

}  // namespace sparse_opt::cuda
