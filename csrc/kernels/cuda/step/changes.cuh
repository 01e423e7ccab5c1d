// The changes that a step records instead of storing them, if it reads no dense memory. Where few elements change,
// streams of whole vectors and scattered writes take less time one after the other than mixed in one kernel
// (docs/notebook.md, "Weights that are not read"), so store_changes(), a kernel of its own, writes the dense elements.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <cuda/annotated_ptr>  // and discard_memory
#include <iterator>
#include <type_traits>

#include "../../arguments.h"
#include "../common/slots.cuh"
#include "../common/warp_sum.cuh"

namespace sparse_opt::cuda {

// A block of store_changes() has kChangeSlots slots. Every kRecordSlots of them, those of a warp in the step, have a
// record of kRecordEntries entries: one for each change if at most so many slots change, otherwise a bit for each slot.
// Records are always written whole, 64 bytes or, in fp32, 128: a write of a part of them takes longer. They should
// stay in the L2 cache until store_changes() has read them, which then discards them: they have no further use there.
constexpr int kRecordSlots = 256, kRecordEntries = 16;
constexpr int kChangeThreads = 512, kBlockRecords = kChangeThreads / kRecordEntries;
constexpr int64_t kChangeSlots = kBlockRecords * kRecordSlots;

// The slot in the record is in the lowest bits, with these flags; the element's bits are in the upper half.
constexpr uint32_t kNoChange = 0x8000;
constexpr uint32_t kHasBits = 0x4000;  // of the first entry, which has kNoChange too: the record's second half has bits

template <typename Param>
struct ChangeRecord {
  using Entry = std::conditional_t<sizeof(Param) <= 2, uint32_t, unsigned long long>;
  using Word = std::conditional_t<sizeof(Param) <= 2, uint16_t, uint32_t>;
  static_assert(sizeof(Word) == sizeof(Param));
  static constexpr int kShift = 4 * sizeof(Entry);

  Entry entries[kRecordEntries];

  __device__ __forceinline__ static Entry entry(int slot, Param value) {
    Word word;
    memcpy(&word, &value, sizeof(word));
    return Entry{word} << kShift | static_cast<Entry>(slot);
  }
  __device__ __forceinline__ static int slot(Entry entry) { return static_cast<int>(entry & (kRecordSlots - 1)); }
  __device__ __forceinline__ static Param value(Entry entry) {
    const auto word = static_cast<Word>(entry >> kShift);
    Param value;
    memcpy(&value, &word, sizeof(value));
    return value;
  }
  // One byte for each thread of the warp: bit j is its slot j.
  __device__ __forceinline__ uint8_t* bits() { return reinterpret_cast<uint8_t*>(entries + kRecordEntries / 2); }
  __device__ __forceinline__ const uint8_t* bits() const {
    return reinterpret_cast<const uint8_t*>(entries + kRecordEntries / 2);
  }
};
static_assert(kRecordEntries / 2 * sizeof(ChangeRecord<uint16_t>::Entry) * 8 == kRecordSlots);

// The layout of a step that records its changes: a warp has the slots of one record.
constexpr int kRecordVector = 4;
using RecordSlots = CompactVectors<128, kRecordSlots / 32, kRecordVector, 8, kBlockRecords / 4>;
static_assert(RecordSlots::kParts * RecordSlots::kThreads == kBlockRecords * 32);

// Whether slot `in_record` changes, of a record with bits: the inverse of RecordSlots::in_warp().
template <typename Param>
__device__ __forceinline__ bool has_bit(const ChangeRecord<Param>& record, int in_record) {
  constexpr int kRow = 32 * kRecordVector;
  const int lane = in_record % kRow / kRecordVector, j = in_record / kRow * kRecordVector + in_record % kRecordVector;
  return (record.bits()[lane] >> j & 1) != 0;
}

// Called by all threads of a warp, with a bit for each of the thread's slots that change, and their new elements.
// `built` is shared memory of the warp alone.
template <typename Param>
__device__ __forceinline__ void write_record(ChangeRecord<Param>* record, ChangeRecord<Param>& built, uint32_t changed,
                                             const Param (&values)[RecordSlots::kUnroll]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int total;
  int next = warp_sum_before(__popc(changed), total);
  if (lane < kRecordEntries) built.entries[lane] = kNoChange;
  __syncwarp();
  if (total <= kRecordEntries) {
#pragma unroll
    for (int j = 0; j < RecordSlots::kUnroll; ++j) {
      if ((changed >> j & 1) != 0) built.entries[next++] = built.entry(RecordSlots::in_warp(lane, j), values[j]);
    }
  } else {
    if (lane == 0) built.entries[0] = kNoChange | kHasBits;
    built.bits()[lane] = static_cast<uint8_t>(changed);
  }
  __syncwarp();
  const ::cuda::annotated_ptr<typename ChangeRecord<Param>::Entry, ::cuda::access_property::persisting> entries{
      record->entries};
  if (lane < kRecordEntries) entries[lane] = built.entries[lane];
}

// Whether the compact buffers of a step can be moved as vectors of `unroll` elements.
inline bool fits_vectors(const StepArguments& args, int unroll = kUnroll) {
  const int state_size = element_size(args.state_dtype);
  return fits_vectors(args.master, sizeof(float), unroll) &&
         fits_vectors(args.weights, element_size(args.param_dtype), unroll) &&
         fits_vectors(args.grad, element_size(args.grad_dtype), unroll) &&
         std::all_of(std::begin(args.states), std::end(args.states),
                     [&](const void* state) { return fits_vectors(state, state_size, unroll); });
}

// Whether a step records its changes: it reads no dense tensor, and moves single elements or short runs.
inline bool records_changes(const StepArguments& args) {
  const bool reads_dense = args.dense_grads != nullptr || (args.weights == nullptr && !args.params_hold_master);
  return !reads_dense && !has_runs_of_vectors(args.segments) && fits_vectors(args, RecordSlots::kUnroll);
}

// Writes the recorded changes to the dense tensors, and leaves the records undefined. Does nothing after a step that
// found_inf skipped.
void store_changes(const char* op, const StepArguments& args, void* records, cudaStream_t stream);

}  // namespace sparse_opt::cuda
