#include "changes.cuh"

#include "../../rounding.h"
#include "../kernels.h"

namespace sparse_opt::cuda {
namespace {

// As many threads as a multiprocessor of an H100 has. A thread has one entry: with two or four, the writes take longer
// (docs/notebook.md).
constexpr int kChangeBlocks = 4;

// Drops a block's records from the L2 cache without writing them to memory. Call it by all threads, after a barrier
// that follows all reads of the records.
template <typename Param>
__device__ __forceinline__ void discard_records(ChangeRecord<Param>* records) {
  constexpr int kLineBytes = 128;
  static_assert(sizeof(*records) * kBlockRecords <= kChangeThreads * kLineBytes);
  const int first = static_cast<int>(threadIdx.x) * kLineBytes;
  if (first < static_cast<int>(sizeof(*records)) * kBlockRecords) {
    ::cuda::discard_memory(reinterpret_cast<char*>(records) + first, kLineBytes);
  }
}

template <typename Param, typename Index, int Capacity>
__global__ void __launch_bounds__(kChangeThreads, kChangeBlocks)
    store_changes_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                         const __grid_constant__ StepArguments args, ChangeRecord<Param>* all_records) {
  if (args.found_inf != nullptr && *args.found_inf != 0.0f) return;
  using Record = ChangeRecord<Param>;
  using Entry = typename Record::Entry;
  const BlockRange range = block_range(table, kChangeSlots);
  Param* dense = static_cast<Param*>(table.dense[range.segment]);
  Record* records = all_records + (table.block_offset + blockIdx.x) * kBlockRecords;
  const auto slots = static_cast<int>(range.end - range.origin);
  const auto store = [&](int64_t slot, Param value) {
    dense[position_at<Index>(args.segments, range.number, slot)] = value;
  };

  const int own = static_cast<int>(threadIdx.x) / kRecordEntries;
  const int first_slot = own * kRecordSlots;
  const Entry entry =
      first_slot < slots ? __ldcs(records[own].entries + threadIdx.x % kRecordEntries) : Entry{kNoChange};
  const bool has_bits = (__shfl_sync(0xffffffff, entry, 0, kRecordEntries) & kHasBits) != 0;
  if (!has_bits && (entry & kNoChange) == 0) {
    store(range.origin + first_slot + Record::slot(entry), Record::value(entry));
  }
  if (__syncthreads_or(has_bits)) {
#pragma unroll 4
    for (int round = 0; round < kChangeSlots / kChangeThreads; ++round) {
      const int in_block = round * kChangeThreads + static_cast<int>(threadIdx.x), in_record = in_block % kRecordSlots;
      const Record& record = records[in_block / kRecordSlots];
      if (in_block - in_record >= slots || (record.entries[0] & kHasBits) == 0 || !has_bit(record, in_record)) continue;
      const int64_t slot = range.origin + in_block;
      store(slot, args.weights != nullptr ? static_cast<const Param*>(args.weights)[slot]
                                          : from_float<Param>(args.master[slot]));
    }
    __syncthreads();
  }
  discard_records(records);
}

}  // namespace

int64_t change_bytes(const StepArguments& args) {
  if (!records_changes(args)) return 0;
  int64_t blocks = 0;
  for (int64_t i = 0; i < args.segments.count; ++i) {
    blocks += blocks_of(args.segments.starts[i], args.segments.ends[i], kChangeSlots);
  }
  int64_t bytes = 0;
  dispatch_dtype(args.param_dtype,
                 [&]<typename Param>() { bytes = blocks * kBlockRecords * sizeof(ChangeRecord<Param>); });
  return bytes;
}

void store_changes(const char* op, const StepArguments& args, void* records, cudaStream_t stream) {
  dispatch_dtype(args.param_dtype, [&]<typename Param>() {
    dispatch_index(args.segments.index_type, [&]<typename Index>() {
      for_each_table(args.segments, nullptr, kChangeSlots,
                     [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
                       if (blocks == 0) return;
                       store_changes_kernel<Param, Index><<<blocks, kChangeThreads, 0, stream>>>(
                           table, args, static_cast<ChangeRecord<Param>*>(records));
                       check_launch(op);
                     });
    });
  });
}

}  // namespace sparse_opt::cuda
