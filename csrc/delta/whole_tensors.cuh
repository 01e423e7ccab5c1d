// Lists of tensors for kernels that read every element.
#pragma once

#include <vector>

#include "common/segment_table.cuh"

namespace sparse_opt::cuda {

// Calls launch(table, blocks) for the tables of a list of tensors. Each tensor is one segment with all of its
// elements. Tables without elements are left out.
template <typename Launch>
void for_each_whole_table(int64_t count, void* const* tensors, const void* const* companions, const int64_t* numels,
                          int64_t block, Launch launch) {
  const std::vector<int64_t> starts(count, 0);
  Segments whole;
  whole.count = count;
  whole.dense = tensors;
  whole.starts = starts.data();
  whole.ends = numels;
  for_each_table(whole, companions, block, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
    if (blocks != 0) launch(table, blocks);
  });
}

}  // namespace sparse_opt::cuda
