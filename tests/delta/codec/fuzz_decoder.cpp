// Damaged records through the CPU's decoder, for a build with sanitizers: fuzz_decoder ROUNDS SEED
//
// Every patch is first written by the encoder and decoded. Then, ROUNDS times for each patch: either the bytes, the
// size and the head of one tile are changed, and all other tiles must decode; or offsets or tables are changed, and the
// decoder must stay within its memory. All buffers have exactly their stated length. Prints how often each mode of
// each level was written.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "delta/patch_codec.h"

using namespace sparse_opt;

namespace {

std::mt19937_64 engine;

// A whole number below `end`.
uint64_t below(uint64_t end) {
  return end == 0 ? 0 : engine() % end;
}

void serially(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) body(0, count);
}

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "fuzz_decoder: %s\n", why.c_str());
  std::exit(1);
}

using Bytes = std::vector<uint8_t>;

struct Patch {
  PatchLevel level = PatchLevel::kPacked;
  int size = 0;  // of an element
  bool is_float = false;
  int class_shift = 0, width = 0;
  std::vector<int64_t> numels, first_tile = {0};
  std::vector<Bytes> old_tensors, new_tensors;
  std::vector<uint16_t> heads, sizes16, row_of, rows, values;
  std::vector<uint32_t> sizes32;
  std::vector<int64_t> offsets;
  Bytes records, class_table;

  int64_t tiles() const { return first_tile.back(); }
  bool is_tight() const { return level == PatchLevel::kTight; }

  // `dense` holds a pointer to each tensor.
  PatchArguments arguments(std::vector<void*>& dense) {
    PatchArguments args;
    args.count = static_cast<int64_t>(numels.size());
    args.old_tensors = dense.data();
    args.numels = numels.data();
    args.first_tile = first_tile.data();
    args.element_size = size;
    args.level = level;
    args.is_float = is_float;
    args.class_shift = class_shift;
    args.width = width;
    args.row_of = row_of.data();
    args.rows = rows.data();
    args.class_table = class_table.data();
    args.values = values.data();
    args.row_count = static_cast<int>(rows.size() / kClasses);
    args.value_tables = static_cast<int>(values.size() / patch_symbols(size));
    args.heads = heads.data();
    args.sizes = is_tight() ? static_cast<void*>(sizes32.data()) : sizes16.data();
    args.offsets = offsets.data();
    args.records = records.data();
    args.record_bytes = static_cast<int64_t>(records.size());
    return args;
  }

  int64_t record_bytes(int64_t tile) const {
    return is_tight() ? int64_t{kTightUnit} * (sizes32[tile] & ~kRawBit) : int64_t{kRecordUnit} * sizes16[tile];
  }

  void set_offsets() {
    offsets.assign(tiles() + 1, 0);
    for (int64_t tile = 0; tile < tiles(); ++tile) offsets[tile + 1] = offsets[tile] + record_bytes(tile);
  }
};

std::vector<void*> pointers(std::vector<Bytes>& tensors) {
  std::vector<void*> found;
  for (Bytes& tensor : tensors) found.push_back(tensor.data());
  return found;
}

// The number of the damaged tile, or the number of tiles. `dense` becomes what the decoder makes of the old tensors.
int64_t decode(const Patch& patch, std::vector<Bytes>& dense) {
  Patch exact = patch;  // the memory of a copy ends where its numbers end
  dense = patch.old_tensors;
  std::vector<void*> at = pointers(dense);
  PatchArguments args = exact.arguments(at);
  std::vector<int64_t> bad_tile(1, patch.tiles());
  args.bad_tile = bad_tile.data();
  cpu::patch_apply(args, serially);
  return bad_tile[0];
}

// Of `changed` in 1000 words, by a few steps or to any bits.
Patch make_patch(PatchLevel level, int size, bool is_float, std::vector<int64_t> numels, int changed, bool any_bits) {
  Patch patch;
  patch.level = level;
  patch.size = size;
  patch.is_float = is_float;
  patch.class_shift = is_float ? std::max(0, 8 * size - 9) : 8 * size;
  patch.width = static_cast<int>(below(8 * size));
  patch.numels = std::move(numels);
  for (const int64_t numel : patch.numels) {
    Bytes old_words(numel * size), new_words;
    for (uint8_t& byte : old_words) byte = static_cast<uint8_t>(below(256));
    new_words = old_words;
    for (int64_t i = 0; i < numel; ++i) {
      if (below(1000) >= static_cast<uint64_t>(changed)) continue;
      for (int k = 0; k < (any_bits ? size : 1); ++k) {
        new_words[i * size + k] += static_cast<uint8_t>(any_bits ? below(256) : 1 + below(3));
      }
    }
    patch.old_tensors.push_back(std::move(old_words));
    patch.new_tensors.push_back(std::move(new_words));
    patch.first_tile.push_back(patch.tiles() + (numel + patch_tile(level) - 1) / patch_tile(level));
  }
  const int symbols = patch_symbols(size), tables = 1 + static_cast<int>(below(3));
  patch.row_of.assign(patch.numels.size(), 0);
  patch.rows.resize(2 * kClasses);
  for (uint16_t& f : patch.rows) f = static_cast<uint16_t>(1 + below(std::min(65535, 131 * (changed + 1))));
  for (uint16_t& row : patch.row_of) row = static_cast<uint16_t>(below(2));
  patch.class_table.resize(kClasses);
  for (uint8_t& table : patch.class_table) table = static_cast<uint8_t>(below(tables));
  patch.values.assign(tables * symbols, static_cast<uint16_t>((1 << kValueScaleBits) / 2 / symbols));
  for (int table = 0; table < tables; ++table) {
    const auto begin = patch.values.begin() + table * symbols;
    *(begin + table) += static_cast<uint16_t>((1 << kValueScaleBits) - std::accumulate(begin, begin + symbols, 0));
  }

  if (!patch.is_tight()) patch.heads.resize(patch.tiles());
  patch.is_tight() ? patch.sizes32.resize(patch.tiles()) : patch.sizes16.resize(patch.tiles());
  std::vector<void*> old_at = pointers(patch.old_tensors), new_at = pointers(patch.new_tensors);
  std::vector<int64_t> changes(patch.numels.size());
  PatchArguments args = patch.arguments(old_at);
  args.new_tensors = new_at.data();
  args.changes = changes.data();
  if (const char* fault = cpu::patch_tables_fault(args)) fail(fault);
  for (const Bytes& piece : cpu::patch_encode(args, serially)) {
    patch.records.insert(patch.records.end(), piece.begin(), piece.end());
  }
  patch.set_offsets();
  return patch;
}

void damage_bytes(Bytes& bytes) {
  if (bytes.empty()) return;
  for (uint64_t count = 1 + below(4); count > 0; --count) {
    uint8_t& byte = bytes[below(2) == 0 ? below(bytes.size()) : below(std::min<uint64_t>(64, bytes.size()))];
    switch (below(4)) {
      case 0:
        byte = 0;
        break;
      case 1:
        byte = 0xff;
        break;
      default:
        byte ^= static_cast<uint8_t>(1u << below(8));
    }
  }
}

// One tile has another record, of any length.
Patch with_damaged_tile(const Patch& sound, int64_t tile) {
  Patch patch = sound;
  const auto begin = sound.records.begin() + sound.offsets[tile], end = sound.records.begin() + sound.offsets[tile + 1];
  Bytes record(begin, end);
  const int unit = patch.is_tight() ? kTightUnit : kRecordUnit;
  switch (below(4)) {
    case 0: {
      const uint64_t kept = below(3) == 0 ? below(4) : below(record.size() / unit + 8);
      const size_t before = record.size();
      record.resize(std::min<uint64_t>(kept, 65535) * unit);
      for (size_t i = before; i < record.size(); ++i) record[i] = static_cast<uint8_t>(below(256));
      break;
    }
    case 1:
      for (uint8_t& byte : record) byte = static_cast<uint8_t>(below(256));
      break;
    default:
      damage_bytes(record);
  }
  const auto units = static_cast<uint32_t>(record.size() / unit);
  if (patch.is_tight()) {
    patch.sizes32[tile] = units | (below(8) == 0 ? kRawBit : patch.sizes32[tile] & kRawBit);
  } else {
    patch.sizes16[tile] = static_cast<uint16_t>(units);
    if (below(3) == 0) patch.heads[tile] ^= static_cast<uint16_t>(1u << below(16));
    if (below(6) == 0) patch.heads[tile] = static_cast<uint16_t>(below(65536));
  }
  Bytes records(sound.records.begin(), begin);
  records.insert(records.end(), record.begin(), record.end());
  records.insert(records.end(), end, sound.records.end());
  patch.records = std::move(records);
  patch.set_offsets();
  return patch;
}

template <typename Number>
void damage_number(std::vector<Number>& numbers, Number number) {
  if (!numbers.empty()) numbers[below(numbers.size())] = number;
}

// Offsets, sizes or tables that fit nothing.
Patch with_damaged_frame(const Patch& sound) {
  Patch patch = sound;
  const int64_t offsets[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - 3,
                             static_cast<int64_t>(below(1 << 20)) * 2 - (1 << 19)};
  switch (below(6)) {
    case 0:
      damage_number(patch.offsets, offsets[below(5)]);
      break;
    case 1:
      damage_number(patch.sizes16, static_cast<uint16_t>(below(65536)));
      damage_number(patch.sizes32, static_cast<uint32_t>(engine()));
      break;
    case 2:
      damage_number(patch.row_of, static_cast<uint16_t>(below(65536)));
      break;
    case 3:
      damage_number(patch.class_table, static_cast<uint8_t>(below(256)));
      break;
    case 4:
      damage_number(patch.values, static_cast<uint16_t>(below(2) == 0 ? 0 : below(65536)));
      break;
    default:
      damage_number(patch.rows, static_cast<uint16_t>(0));
      patch.records.resize(below(patch.records.size() + 1));
  }
  return patch;
}

void fuzz(const Patch& sound, int rounds) {
  std::vector<Bytes> dense;
  if (const int64_t bad = decode(sound, dense); bad != sound.tiles()) fail("a sound tile is called damaged");
  if (dense != sound.new_tensors) fail("a sound patch decodes to something else");
  for (int round = 0; round < rounds; ++round) {
    const auto tile = static_cast<int64_t>(below(sound.tiles()));
    if (below(4) == 0) {
      decode(with_damaged_frame(sound), dense);
      continue;
    }
    const int64_t bad = decode(with_damaged_tile(sound, tile), dense);
    if (bad != tile && bad != sound.tiles()) fail("a sound tile next to a damaged one is called damaged");
    for (size_t i = 0; i < sound.numels.size(); ++i) {
      for (int64_t at = sound.first_tile[i]; at < sound.first_tile[i + 1]; ++at) {
        const int64_t begin = (at - sound.first_tile[i]) * patch_tile(sound.level);
        const int64_t end = std::min(begin + patch_tile(sound.level), sound.numels[i]);
        const auto found = dense[i].cbegin() + begin * sound.size;
        const auto expected = sound.new_tensors[i].cbegin() + begin * sound.size;
        if (at != tile && !std::equal(found, found + (end - begin) * sound.size, expected)) {
          fail("a sound tile next to a damaged one decodes to other words");
        }
      }
    }
  }
}

void count_modes(const Patch& patch, std::map<std::string, int>& modes) {
  const char* names[3] = {"packed-elias", "packed-bitmap", "packed-raw"};
  for (int64_t tile = 0; tile < patch.tiles(); ++tile) {
    if (patch.record_bytes(tile) == 0) continue;
    if (patch.is_tight()) {
      ++modes[(patch.sizes32[tile] & kRawBit) != 0 ? "tight-raw" : "tight-coded"];
    } else {
      ++modes[names[patch.heads[tile] >> kModeShift]];
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("expected ROUNDS SEED");
  const int rounds = std::atoi(argv[1]);
  engine.seed(std::strtoull(argv[2], nullptr, 10));
  std::map<std::string, int> modes;
  int decoded = 0;
  for (const PatchLevel level : {PatchLevel::kPacked, PatchLevel::kTight}) {
    // Of `tight` one tensor of a lane, one of two with a ragged last row; `packed` has several tiles.
    const std::vector<int64_t> numels = level == PatchLevel::kTight
                                            ? std::vector<int64_t>{301, kLaneRows + 1, 1}
                                            : std::vector<int64_t>{301, 2 * kPatchTile + 77, 0, 1};
    for (const int size : {1, 2, 4, 8}) {
      for (const bool is_float : {false, true}) {
        for (const int changed : {12, 300, 1000}) {
          const Patch patch = make_patch(level, size, is_float, numels, changed, changed == 1000 || below(2) == 0);
          count_modes(patch, modes);
          fuzz(patch, rounds);
          decoded += rounds;
        }
      }
    }
  }
  // All lanes of a tile, and more than half of those of the next.
  const Patch wide = make_patch(PatchLevel::kTight, 2, true, {kTightTile + 17 * kLaneRows + 5}, 12, false);
  count_modes(wide, modes);
  fuzz(wide, rounds / 20 + 1);
  for (const auto& [mode, count] : modes) std::printf("%s %d\n", mode.c_str(), count);
  std::printf("decoded %d\n", decoded);
  return 0;
}
