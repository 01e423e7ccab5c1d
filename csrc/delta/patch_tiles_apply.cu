// Decoder of `packed`. patch_apply reads the records once and accesses the cache lines of the tensor that
// change. One warp decodes a tile; whatever a record contains, it reads within the record and writes within the tile.
#include "common/dispatch.cuh"
#include "compare.cuh"
#include "patch_kernels.h"
#include "patch_records.cuh"
#include "warp_sum.cuh"

namespace sparse_opt::cuda {
namespace {

// Records are aligned to 4 bytes.
template <typename Word>
__device__ __forceinline__ Word load_word(const uint8_t* at) {
  if constexpr (sizeof(Word) == 8) {
    const uint32_t* halves = reinterpret_cast<const uint32_t*>(at);
    return static_cast<Word>(halves[1]) << 32 | halves[0];
  } else {
    return *reinterpret_cast<const Word*>(at);
  }
}

template <typename Word>
__device__ __forceinline__ void apply_raw(Word* words, int t, const uint8_t* record) {
  for (int k = threadIdx.x % 32; k < t; k += 32) words[k] = load_word<Word>(record + k * sizeof(Word));
}

// A stream of `bits` bits. A read beyond its end returns 0 and sets `bad`.
struct BitStream {
  const uint32_t* words;
  int64_t bits;
  bool bad = false;

  __device__ __forceinline__ uint32_t take(int64_t at, int width) {  // of 0 to 32 bits
    if (width == 0) return 0;
    if (at < 0 || at + width > bits) {
      bad = true;
      return 0;
    }
    const int64_t i = at / 32;
    const int shift = static_cast<int>(at % 32);
    uint64_t both = words[i];
    if (shift + width > 32) both |= static_cast<uint64_t>(words[i + 1]) << 32;
    return static_cast<uint32_t>(both >> shift) & low_bits(width);
  }

  __device__ __forceinline__ uint64_t take_wide(int64_t at, int width) {  // of 0 to 64 bits
    const uint64_t low = take(at, min(width, 32));
    return width > 32 ? low | static_cast<uint64_t>(take(at + 32, width - 32)) << 32 : low;
  }
};

// Ranks within sections 3 and 4 of a warp's record: the number of bits set before each group of 32.
struct PackedRanks {
  uint16_t bigs[kPatchTile / 32];
  uint16_t escapes[kPatchTile / 32];
  uint32_t escaped[kPatchTile / 32];
};

template <typename Word>
__device__ __forceinline__ bool apply_packed(Word* words, int t, uint32_t head, const uint8_t* record, int64_t length,
                                             const PatchArguments& args, PackedRanks& ranks) {
  const int n = static_cast<int>(head & kCountMask), mode = static_cast<int>(head >> kModeShift);
  const int lane = threadIdx.x % 32, width = args.width;
  if (n > t || mode > kModeRaw || (n == 0) != (length == 0) || (n == 0 && head != 0)) return true;
  if (n == 0) return false;
  if (mode == kModeRaw) {
    const int64_t bytes = static_cast<int64_t>(t) * sizeof(Word);
    if ((bytes + kRecordUnit - 1) / kRecordUnit * kRecordUnit != length) return true;
    apply_raw(words, t, record);
    return false;
  }
  BitStream stream{reinterpret_cast<const uint32_t*>(record), length * 8};
  const int k = elias_fano_k(n, t);
  const int high = mode == kModeBitmap ? 0 : n * k, high_bits = mode == kModeBitmap ? t : elias_fano_high(n, t, k);
  const int64_t signs = high + high_bits, bigs = signs + n, fields = bigs + n;
  if (fields > stream.bits) return true;
  const int n_words = (n + 31) / 32;
  int m = 0;
  for (int first = 0; first < n_words; first += 32) {
    const int i = first + lane;
    const int count = i < n_words ? __popc(stream.take(bigs + 32 * i, min(32, n - 32 * i))) : 0;
    int total;
    const int before = m + warp_sum_before(count, total);
    if (i < n_words) ranks.bigs[i] = static_cast<uint16_t>(before);
    m += total;
  }
  const int64_t values = fields + static_cast<int64_t>(m) * width;
  if (values > stream.bits) return true;
  const uint64_t escape = (uint64_t{1} << width) - 1;
  int escapes = 0;
  for (int first = 0; first < m; first += 32) {
    const int i = first + lane;
    const bool is_escape = i < m && stream.take_wide(fields + static_cast<int64_t>(i) * width, width) == escape;
    const uint32_t flags = __ballot_sync(0xffffffffu, is_escape);
    if (lane == 0) {
      ranks.escapes[first / 32] = static_cast<uint16_t>(escapes);
      ranks.escaped[first / 32] = flags;
    }
    escapes += __popc(flags);
  }
  __syncwarp();
  const int64_t end = values + static_cast<int64_t>(escapes) * kWordBits<Word>;
  if (end > stream.bits || stream.bits - end >= 32) return true;
  bool bad = stream.take(end, static_cast<int>(stream.bits - end)) != 0;

  int found = 0;
  for (int first = 0; first < high_bits; first += 32 * 32) {
    const int begin = first + 32 * lane;
    uint32_t bits = begin < high_bits ? stream.take(high + begin, min(32, high_bits - begin)) : 0;
    int total;
    int rank = found + warp_sum_before(__popc(bits), total);
    for (; bits != 0; bits &= bits - 1, ++rank) {
      if (rank >= n) {
        bad = true;
        break;
      }
      const int bit = begin + __ffs(static_cast<int>(bits)) - 1;
      int position = bit;
      if (mode != kModeBitmap) {
        const uint32_t low = stream.take(rank * k, k);
        position = (bit - rank) << k | static_cast<int>(low);
        const bool same_high = bit > 0 && stream.take(high + bit - 1, 1) != 0;
        if (same_high && low <= stream.take((rank - 1) * k, k)) bad = true;
      }
      if (position >= t) {
        bad = true;
        continue;
      }
      Change<Word> change = {stream.take(signs + rank, 1) != 0, 1};
      const uint32_t above = stream.take(bigs + rank / 32 * 32, rank % 32 + 1);
      if ((above >> (rank % 32) & 1) != 0) {
        const int field = ranks.bigs[rank / 32] + __popc(above) - 1;
        const uint32_t escaped = ranks.escaped[field / 32];
        if ((escaped >> (field % 32) & 1) != 0) {
          const int word = ranks.escapes[field / 32] + __popc(escaped & low_bits(field % 32));
          words[position] = static_cast<Word>(
              stream.take_wide(values + static_cast<int64_t>(word) * kWordBits<Word>, kWordBits<Word>));
          continue;
        }
        change.magnitude = static_cast<Word>(stream.take_wide(fields + static_cast<int64_t>(field) * width, width) + 2);
      }
      words[position] = moved(words[position], change, args.is_float);
    }
    found += total;
  }
  return bad || stream.bad || found != n;
}

template <typename Word, int Capacity>
__global__ void __launch_bounds__(kThreads) patch_apply_kernel(const __grid_constant__ SegmentTable<Capacity> table,
                                                               const __grid_constant__ PatchArguments args) {
  __shared__ PackedRanks ranks[kWarps];
  const int warp = threadIdx.x / 32;
  const auto local = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (local >= table.first_block[table.count]) return;
  const int64_t number = table.block_offset + local;
  const BlockRange range = block_range(table, kPatchTile, local);
  Word* words = static_cast<Word*>(table.dense[range.segment]) + range.begin;
  const int t = static_cast<int>(range.end - range.begin);
  const int64_t length = int64_t{kRecordUnit} * static_cast<const uint16_t*>(args.sizes)[number];
  const uint32_t head = args.heads[number];
  bool bad = !has_record(args, number, length, kRecordUnit);
  if (!bad) bad = apply_packed(words, t, head, args.records + args.offsets[number], length, args, ranks[warp]);
  if (bad) report_damage(args, number);
}

}  // namespace

void patch_apply(const PatchArguments& args, cudaStream_t stream) {
  dispatch_word(args.element_size, [&]<typename Word>() {
    for_each_tile_table(args, [&]<int Capacity>(const SegmentTable<Capacity>& table, unsigned tiles) {
      const unsigned blocks = (tiles + kWarps - 1) / kWarps;
      patch_apply_kernel<Word><<<blocks, kThreads, 0, stream>>>(table, args);
    });
  });
}

}  // namespace sparse_opt::cuda
