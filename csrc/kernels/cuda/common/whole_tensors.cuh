// Lists of tensors that a kernel goes through from the first element to the last.
#pragma once

#include <vector>

#include "segment_table.cuh"

namespace sparse_opt::cuda {

// A table for each part of a list of tensors, of which each is one segment from its first element to its last.
// launch(table, its number of blocks); tables without elements are left out.
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
