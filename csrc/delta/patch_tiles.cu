// Encoder of `packed`. encode_to_slots reads both tensors once, 2 * element size bytes per element, which
// is the bandwidth bound, and writes each tile's record to a slot of its own. Once the sum of the lengths is known,
// compact_slots copies the records together, which reads and writes their bytes once more. A record that is longer than
// a slot is encoded again, to its final place.
#include "common/dispatch.cuh"
#include "compare.cuh"
#include "patch_kernels.h"
#include "patch_records.cuh"

namespace sparse_opt::cuda {
namespace {

static_assert(kPatchTile == kDeltaBlock, "a tile is compared as one block of compare.cuh");

// Records are aligned to 4 bytes.
template <typename Word>
__device__ __forceinline__ void store_word(uint8_t* at, Word w) {
  if constexpr (sizeof(Word) == 8) {
    reinterpret_cast<uint32_t*>(at)[0] = static_cast<uint32_t>(w);
    reinterpret_cast<uint32_t*>(at)[1] = static_cast<uint32_t>(w >> 32);
  } else {
    *reinterpret_cast<Word*>(at) = w;
  }
}

// Writes a field of up to 64 bits to a stream whose bits are 0.
__device__ __forceinline__ void put_bits(uint32_t* stream, int at, int width, uint64_t value) {
  while (width > 0) {
    const int shift = at % 32, taken = min(32 - shift, width);
    atomicOr(stream + at / 32, (static_cast<uint32_t>(value) & low_bits(taken)) << shift);
    value >>= taken;
    at += taken;
    width -= taken;
  }
}

__device__ __forceinline__ void fill_to_unit(uint8_t* record, int64_t length) {
  const int64_t filled = (length + kRecordUnit - 1) / kRecordUnit * kRecordUnit;
  if (length + threadIdx.x < filled) record[length + threadIdx.x] = 0;
}

template <typename Word>
__device__ __forceinline__ void copy_raw(const Word* new_words, int t, uint8_t* record) {
  for (int k = threadIdx.x; k < t; k += kThreads) store_word(record + k * sizeof(Word), new_words[k]);
  fill_to_unit(record, static_cast<int64_t>(t) * sizeof(Word));
}

// A tile that its block has compared.
template <typename Word>
struct TileChanges {
  const Word* old_words;
  const Word* new_words;
  int t;
  uint32_t bits;  // of this thread's words, the 32 from 32 * threadIdx.x on
  int n, rank;    // the tile's changes, and those before this thread's
};

// Encodes a tile. `destination(length in units)` returns where to collect the bits of the record: shared memory if it
// fits a slot, else its place in the records, or null not to write it. Returns the head, and in `units` the length in
// units of kRecordUnit bytes. A thread encodes every kThreads-th change, because most groups of 32 words have few
// changes or none.
struct PackedTile {
  uint16_t positions[kPatchTile];

  template <typename Word, typename Destination>
  __device__ __forceinline__ uint32_t encode(const TileChanges<Word>& tile, const PatchArguments& args, int& units,
                                             Destination destination) {
    const int n = tile.n, t = tile.t, width = args.width;
    const Word escape = static_cast<Word>((Word{1} << width) - 1);
    int rank = tile.rank;
    for (uint32_t bits = tile.bits; bits != 0; bits &= bits - 1) {
      positions[rank++] = static_cast<uint16_t>(threadIdx.x * 32 + __ffs(static_cast<int>(bits)) - 1);
    }
    __syncthreads();
    int big = 0, escaped = 0;
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const Change<Word> change = change_at(tile, positions[i], args.is_float);
      big += change.magnitude > 1 ? 1 : 0;
      escaped += change.magnitude > 1 && static_cast<Word>(change.magnitude - 2) >= escape ? 1 : 0;
    }
    const uint32_t total = block_sum_in_all_threads(static_cast<uint32_t>(big) << 16 | static_cast<uint32_t>(escaped));
    const int m = static_cast<int>(total >> 16), escapes = static_cast<int>(total & 0xffffu);
    const int k = elias_fano_k(n, t);
    const int elias_fano = n * k + elias_fano_high(n, t, k);
    int mode = elias_fano <= t ? kModeEliasFano : kModeBitmap;
    const int signs = mode == kModeBitmap ? t : elias_fano, bigs = signs + n, fields = bigs + n;
    const int words = fields + m * width;
    units = (words + escapes * kWordBits<Word> + 31) / 32;
    const int raw = static_cast<int>((static_cast<int64_t>(t) * sizeof(Word) + kRecordUnit - 1) / kRecordUnit);
    if (raw < units) mode = kModeRaw, units = raw;
    uint8_t* record = destination(units);
    if (record == nullptr) return n | mode << kModeShift;
    if (mode == kModeRaw) {
      copy_raw(tile.new_words, t, record);
      return n | mode << kModeShift;
    }
    uint32_t* stream = reinterpret_cast<uint32_t*>(record);
    for (int i = threadIdx.x; i < units; i += kThreads) stream[i] = 0;
    __syncthreads();
    if (mode == kModeBitmap && tile.bits != 0) atomicOr(stream + threadIdx.x, tile.bits);
    int field = fields, word = words;
    for (int first = 0; first < n; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const bool part = i < n;
      const int position = part ? positions[i] : 0;
      Change<Word> change = {false, 1};
      if (part) change = change_at(tile, position, args.is_float);
      const bool is_big = change.magnitude > 1;
      const auto rest = static_cast<Word>(change.magnitude - 2);
      const bool is_escaped = is_big && rest >= escape;
      uint32_t turn;
      if (first != 0) __syncthreads();  // block_rank reuses its shared memory
      const uint32_t before = block_rank((is_big ? 1u << 16 : 0u) | (is_escaped ? 1u : 0u), turn);
      if (part) {
        if (mode == kModeEliasFano) {
          put_bits(stream, i * k, k, static_cast<uint64_t>(position) & ((1u << k) - 1u));
          put_bits(stream, n * k + (position >> k) + i, 1, 1);
        }
        if (change.negative) put_bits(stream, signs + i, 1, 1);
        if (is_big) {
          put_bits(stream, bigs + i, 1, 1);
          put_bits(stream, field + static_cast<int>(before >> 16) * width, width, is_escaped ? escape : rest);
        }
        if (is_escaped) {
          put_bits(stream, word + static_cast<int>(before & 0xffffu) * kWordBits<Word>, kWordBits<Word>,
                   tile.new_words[position]);
        }
      }
      field += static_cast<int>(turn >> 16) * width;
      word += static_cast<int>(turn & 0xffffu) * kWordBits<Word>;
    }
    return n | mode << kModeShift;
  }

 private:
  template <typename Word>
  static __device__ __forceinline__ Change<Word> change_at(const TileChanges<Word>& tile, int position, bool is_float) {
    return change_of(tile.old_words[position], tile.new_words[position], is_float);
  }
};

template <typename Word>
__device__ __forceinline__ TileChanges<Word> compare_tile(ChangedBits& changed, const Word* old_words,
                                                          const Word* new_words, int t) {
  changed.compare(old_words, new_words, t);
  TileChanges<Word> tile = {old_words, new_words, t, changed.words[threadIdx.x], 0, 0};
  tile.rank = block_rank(__popc(tile.bits), tile.n);
  return tile;
}

// Copies the changed words to the old tensor, once the whole block has read its words.
template <typename Word>
__device__ __forceinline__ void advance_tile(const TileChanges<Word>& tile) {
  __syncthreads();
  for (uint32_t bits = tile.bits; bits != 0; bits &= bits - 1) {
    const int k = static_cast<int>(threadIdx.x) * 32 + __ffs(static_cast<int>(bits)) - 1;
    const_cast<Word*>(tile.old_words)[k] = tile.new_words[k];
  }
}

// One block for each tile.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads, 6)
    encode_to_slots_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                           const __grid_constant__ PatchArguments args) {
  __shared__ ChangedBits changed;
  __shared__ PackedTile coder;
  __shared__ __align__(16) uint32_t staged[kPatchTile * sizeof(Word) / 8 / 4];
  const BlockRange range = block_range(table, kPatchTile);
  const int64_t number = table.block_offset + blockIdx.x;
  const TileChanges<Word> tile = compare_tile(
      changed, static_cast<const Word*>(table.companions[range.segment]) + range.begin,
      static_cast<const Word*>(table.dense[range.segment]) + range.begin, static_cast<int>(range.end - range.begin));
  uint32_t head = 0;
  int units = 0;
  auto* slot = reinterpret_cast<uint32_t*>(args.slots + number * args.slot_bytes);
  if (tile.n != 0) {
    head = coder.encode(tile, args, units, [&](int length) -> uint8_t* {
      return length * kRecordUnit <= args.slot_bytes ? reinterpret_cast<uint8_t*>(staged) : nullptr;
    });
    if (units * kRecordUnit <= args.slot_bytes) {
      __syncthreads();
      for (int i = threadIdx.x; i < units; i += kThreads) __stcs(slot + i, staged[i]);
    }
    if (args.advance && units * kRecordUnit <= args.slot_bytes) advance_tile(tile);
  }
  if (threadIdx.x == 0) {
    args.heads[number] = static_cast<uint16_t>(head);
    static_cast<uint16_t*>(args.sizes)[number] = static_cast<uint16_t>(units);
    args.lengths[number] = static_cast<int64_t>(units) * kRecordUnit;
    if (tile.n != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(args.changes + range.number), tile.n);
      if (units * kRecordUnit > args.slot_bytes) {
        args.overflowed[atomicAdd(reinterpret_cast<unsigned long long*>(args.overflows), 1ull)] = number;
      }
    }
  }
}

// One warp for each tile: copies its slot to its place in the records, if it ends within them.
__global__ void __launch_bounds__(kThreads)
    compact_slots_kernel(const __grid_constant__ PatchArguments args, int64_t tiles) {
  const int64_t number = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  if (number >= tiles) return;
  const int64_t begin = args.offsets[number], length = args.offsets[number + 1] - begin;
  if (length > args.slot_bytes || begin + length > args.record_bytes) return;
  const uint32_t* slot = reinterpret_cast<const uint32_t*>(args.slots + number * args.slot_bytes);
  uint32_t* place = reinterpret_cast<uint32_t*>(args.records + begin);
  for (int i = threadIdx.x % 32; i < length / 4; i += 32) place[i] = __ldcs(slot + i);
}

// One block for each tile whose record does not fit a slot.
template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads) encode_overflow_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                                   const __grid_constant__ PatchArguments args) {
  __shared__ ChangedBits changed;
  __shared__ PackedTile coder;
  const int64_t number = args.overflowed[blockIdx.x];
  const int64_t local = number - table.block_offset;
  if (local < 0 || local >= table.first_block[table.count]) return;  // another table's
  const BlockRange range = block_range(table, kPatchTile, static_cast<int>(local));
  const TileChanges<Word> tile = compare_tile(
      changed, static_cast<const Word*>(table.companions[range.segment]) + range.begin,
      static_cast<const Word*>(table.dense[range.segment]) + range.begin, static_cast<int>(range.end - range.begin));
  int units;
  coder.encode(tile, args, units, [&](int) { return args.records + args.offsets[number]; });
  if (args.advance) advance_tile(tile);
}

}  // namespace

void encode_to_slots(const PatchArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_tile_table(args, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned blocks) {
      encode_to_slots_kernel<Word><<<blocks, kThreads, 0, stream>>>(table, args);
    });
  });
}

void compact_slots(const PatchArguments& args, cudaStream_t stream) {
  const int64_t tiles = args.tiles();
  compact_slots_kernel<<<static_cast<unsigned>((tiles + kWarps - 1) / kWarps), kThreads, 0, stream>>>(args, tiles);
  check_launch("patch");
}

void encode_overflow(const PatchArguments& args, int64_t overflows, cudaStream_t stream) {
  if (overflows == 0) return;
  const auto blocks = static_cast<unsigned>(overflows);
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_tile_table(args, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned) {
      encode_overflow_kernel<Word><<<blocks, kThreads, 0, stream>>>(table, args);
    });
  });
}

}  // namespace sparse_opt::cuda
