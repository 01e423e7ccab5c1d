// Bytes per active element: index 2 or 4 (of a run, shared), the compact element read and written; and 64 read and 64
// written for each 64-byte line of the dense tensors that the mask touches.
#include <cstring>

#include "blocks.h"
#include "kernels.h"

namespace sparse_opt::cpu {
namespace {

template <typename Word>
void swap_chunks(const MoveArguments& args, const std::vector<Chunk>& chunks, int64_t first, int64_t last) {
  alignas(64) Word held[kBlock];
  for (int64_t c = first; c < last; ++c) {
    void* dense = args.segments.dense[chunks[c].segment];
    const auto prefetch = [&](const BlockIndices& block) { block.prefetch<Word>(dense); };
    for_each_block(args.segments, chunks[c], prefetch, [&](const BlockIndices& block) {
      Word* compact = static_cast<Word*>(args.compact) + block.begin;
      block.gather<Word>(dense, held);
      block.scatter<Word>(dense, compact);
      std::memcpy(compact, held, block.size * sizeof(Word));
    });
  }
}

}  // namespace

void indexed_swap(const MoveArguments& args, ParallelFor parallel_for) {
  const Work work(args.segments);
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    switch (args.element_size) {
      case 1:
        swap_chunks<uint8_t>(args, work.chunks, first, last);
        break;
      case 2:
        swap_chunks<uint16_t>(args, work.chunks, first, last);
        break;
      case 4:
        swap_chunks<uint32_t>(args, work.chunks, first, last);
        break;
      case 8:
        swap_chunks<uint64_t>(args, work.chunks, first, last);
        break;
    }
  });
}

}  // namespace sparse_opt::cpu
