#include "patch_tight.h"

namespace sparse_opt::cpu {

TightCoder::TightCoder(const PatchArguments& args) : args_(args) {
  if (args.level != PatchLevel::kTight) return;
  constexpr int kOne = 1 << kValueScaleBits;
  symbols_ = patch_symbols(args.element_size);
  const auto is_missing = [&](int table) { return table >= args.value_tables; };
  if (std::any_of(args.class_table, args.class_table + kClasses, is_missing)) {
    fault_ = "class_table names a value table that is not there";
    return;
  }
  const uint16_t* rows_end = args.rows + int64_t{args.row_count} * kClasses;
  if (std::find(args.rows, rows_end, 0) != rows_end) {
    fault_ = "rows have a frequency of 0";
    return;
  }
  const bool for_apply = args.bad_tile != nullptr;
  ranges_.reserve(static_cast<size_t>(args.value_tables) * symbols_);
  if (for_apply) slots_.resize(static_cast<size_t>(args.value_tables) << kValueScaleBits);
  for (int table = 0; table < args.value_tables; ++table) {
    int start = 0;
    for (int symbol = 0; symbol < symbols_; ++symbol) {
      const uint16_t frequency = args.values[table * symbols_ + symbol];
      if (frequency == 0 || start + frequency > kOne) break;
      ranges_.push_back({frequency, static_cast<uint16_t>(start)});
      if (for_apply) std::memset(slots_.data() + (int64_t{table} << kValueScaleBits) + start, symbol, frequency);
      start += frequency;
    }
    if (ranges_.size() != static_cast<size_t>(table + 1) * symbols_ || start != kOne) {
      fault_ = "values are no frequencies in 16384";
      return;
    }
  }
}

}  // namespace sparse_opt::cpu
