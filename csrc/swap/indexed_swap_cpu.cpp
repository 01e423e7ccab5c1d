// Bytes per active element of a swap: index 2 or 4 (of a run, shared), the compact element read and written; and 64
// read and 64 written for each 64-byte line of the dense tensors that the mask touches.
#include <cstring>

#include "common/blocks.h"
#include "common/with_word.h"
#include "swap.h"

namespace sparse_opt::cpu {
namespace {

template <typename Word>
void swap_chunks(const MoveArguments& args, const Work& work, int64_t first, int64_t last) {
  alignas(64) Word held[kBlock];
  work.for_each_stretch(first, last, [&](const Chunk& chunk) {
    void* dense = args.segments.dense[chunk.segment];
    const auto prefetch = [&](const BlockIndices& block) { block.prefetch<Word>(dense); };
    for_each_block(args.segments, chunk, 1, prefetch, [&](const BlockIndices& block) {
      Word* compact = static_cast<Word*>(args.compact) + block.begin;
      block.gather<Word>(dense, held);
      block.scatter<Word>(dense, compact);
      std::memcpy(compact, held, block.size * sizeof(Word));
    });
  });
}

template <typename Word>
void take_chunks(const MoveArguments& args, const Work& work, int64_t first, int64_t last) {
  work.for_each_stretch(first, last, [&](const Chunk& chunk) {
    void* dense = args.segments.dense[chunk.segment];
    const auto prefetch = [&](const BlockIndices& block) { block.prefetch<Word>(dense); };
    for_each_block(args.segments, chunk, 1, prefetch, [&](const BlockIndices& block) {
      block.gather<Word>(dense, static_cast<Word*>(args.compact) + block.begin);
    });
  });
}

}  // namespace

void indexed_swap(const MoveArguments& args, ParallelFor parallel_for) {
  const Work work(args.segments);
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    with_word(args.element_size, [&](auto word) { swap_chunks<decltype(word)>(args, work, first, last); });
  });
}

void indexed_take(const MoveArguments& args, ParallelFor parallel_for) {
  const Work work(args.segments);
  work.run(parallel_for, [&](int64_t first, int64_t last) {
    with_word(args.element_size, [&](auto word) { take_chunks<decltype(word)>(args, work, first, last); });
  });
}

}  // namespace sparse_opt::cpu
