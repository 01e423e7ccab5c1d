// The sample of a large tensor reads one block in sixteen.
#include <mutex>

#include "patch_codec.h"
#include "patch_tiles.h"

namespace sparse_opt::cpu {
namespace {

constexpr int64_t kSpan = int64_t{kSampleBlock} * kSampleStride;  // words; of a large tensor the first block is read

// The counts of one thread. They are integers, so the sums do not depend on the order in which threads add theirs.
class Counts {
 public:
  Counts(const PatchArguments& args, const PatchSample& sample, std::mutex& mutex)
      : args_(args),
        sample_(sample),
        mutex_(mutex),
        symbol_count_(patch_symbols(args.element_size)),
        symbols_(static_cast<size_t>(kClasses) * symbol_count_) {}

  template <typename Word>
  void add(const Word* old_words, const Word* new_words, int64_t n) {
    uint64_t bits[kSampleBlock / 64];
    mark_changes(sizeof(Word), old_words, new_words, n, bits);
    // Neighbours are often of one class. Four arrays avoid a dependency of each increment on the previous one.
    for (int64_t i = 0; i < n; ++i) ++seen_[i % 4][class_of(old_words[i], args_.class_shift)];
    for_each_bit(bits, n, [&](int64_t i) {
      const int of = class_of(old_words[i], args_.class_shift);
      const Change<Word> change = change_of(old_words[i], new_words[i], args_.is_float);
      ++changed_[of];
      ++symbols_[of * symbol_count_ + symbol_of(change.magnitude, change.negative).symbol];
    });
  }

  // Adds the counts of a tensor to the sample.
  void flush_tensor(int64_t tensor) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (int c = 0; c < kClasses; ++c) {
      for (auto& seen : seen_) sample_.seen[tensor * kClasses + c] += seen[c];
      sample_.changed[tensor * kClasses + c] += changed_[c];
    }
    std::memset(seen_, 0, sizeof(seen_));
    std::memset(changed_, 0, sizeof(changed_));
  }

  void flush_symbols() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < symbols_.size(); ++i) sample_.symbols[i] += symbols_[i];
  }

 private:
  const PatchArguments& args_;
  const PatchSample& sample_;
  std::mutex& mutex_;
  int symbol_count_;
  int64_t seen_[4][kClasses] = {};
  int64_t changed_[kClasses] = {};
  std::vector<int64_t> symbols_;
};

}  // namespace

void patch_sample(const PatchArguments& args, const PatchSample& sample, ParallelFor parallel_for) {
  std::vector<int64_t> first_span(args.count + 1);
  for (int64_t i = 0; i < args.count; ++i) first_span[i + 1] = first_span[i] + (args.numels[i] + kSpan - 1) / kSpan;
  std::mutex mutex;
  parallel_for(first_span.back(), [&](int64_t first, int64_t last) {
    Counts counts(args, sample, mutex);
    int64_t tensor = std::upper_bound(first_span.begin(), first_span.end(), first) - first_span.begin() - 1;
    for (int64_t span = first; span < last; ++span) {
      while (span >= first_span[tensor + 1]) counts.flush_tensor(tensor++);
      const int64_t numel = args.numels[tensor], begin = (span - first_span[tensor]) * kSpan;
      const int64_t end = std::min(begin + (numel > kSampledNumel ? kSampleBlock : kSpan), numel);
      with_word(args.element_size, [&](auto word) {
        using Word = decltype(word);
        const Word* old_words = static_cast<const Word*>(args.old_tensors[tensor]);
        const Word* new_words = static_cast<const Word*>(args.new_tensors[tensor]);
        for (int64_t at = begin; at < end; at += kSampleBlock) {
          counts.add(old_words + at, new_words + at, std::min<int64_t>(kSampleBlock, end - at));
        }
      });
    }
    counts.flush_tensor(tensor);
    counts.flush_symbols();
  });
}

}  // namespace sparse_opt::cpu
