#include "patch_tight.h"

namespace sparse_opt::cpu {

TightCoder::TightCoder(const PatchArguments& args) : args_(args) {
  if (args.level != PatchLevel::kTight) return;
  constexpr int kOne = 1 << kValueScaleBits;
  symbols_ = patch_symbols(args.element_size);
  const auto is_missing = [&](int table) { return table >= args.value_tables; };
  std::copy_n(args.class_table, kClasses, class_table_.begin());
  if (std::any_of(class_table_.begin(), class_table_.end(), is_missing)) {
    fault_ = "class_table has a value table number that values does not have";
    return;
  }
  rows_.resize(static_cast<size_t>(args.row_count) * kClasses);
  std::memcpy(rows_.data(), args.rows, rows_.size() * sizeof(uint16_t));
  if (std::find(rows_.begin(), rows_.end(), 0) != rows_.end()) {
    fault_ = "rows have a frequency of 0";
    return;
  }
  const bool for_apply = args.bad_tile != nullptr;
  ranges_.reserve(static_cast<size_t>(args.value_tables) * symbols_);
  if (for_apply) slots_.resize(static_cast<size_t>(args.value_tables) << kValueScaleBits);
  for (int table = 0; table < args.value_tables; ++table) {
    int start = 0;
    for (int symbol = 0; symbol < symbols_; ++symbol) {
      const auto frequency = number_at<uint16_t>(args.values, table * symbols_ + symbol);
      if (frequency == 0 || start + frequency > kOne) break;
      ranges_.push_back({frequency, static_cast<uint16_t>(start)});
      if (for_apply) std::memset(slots_.data() + (int64_t{table} << kValueScaleBits) + start, symbol, frequency);
      start += frequency;
    }
    if (ranges_.size() != static_cast<size_t>(table + 1) * symbols_ || start != kOne) {
      fault_ = "values are not frequencies that sum to 16384";
      return;
    }
  }
}

}  // namespace sparse_opt::cpu
