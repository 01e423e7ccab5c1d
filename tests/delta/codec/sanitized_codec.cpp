// Runs patches of stdin, which test_sanitized.py writes, through the CPU's codec, for a build with sanitizers.
//
// All buffers have exactly their stated length. The first patch of a group of tensors is sound: the encoder must write
// it, and the decoder return the new tensors. Prints the lowest damaged tile of each patch, or its number of tiles.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "delta/patch.h"

using namespace sparse_opt;

namespace {

using Bytes = std::vector<uint8_t>;

// The next array of stdin; its length is in front of it.
template <typename Number>
std::vector<Number> next() {
  int64_t length = 0;
  if (std::fread(&length, sizeof(length), 1, stdin) != 1) std::exit(0);
  std::vector<Number> found(length);
  if (std::fread(found.data(), sizeof(Number), length, stdin) != found.size()) std::exit(2);
  return found;
}

void serially(int64_t count, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) body(0, count);
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

std::vector<void*> pointers(std::vector<Bytes>& tensors) {
  std::vector<void*> found;
  for (Bytes& tensor : tensors) found.push_back(tensor.data());
  return found;
}

}  // namespace

int main() {
  while (true) {
    const auto kind = next<int64_t>();
    const auto numels = next<int64_t>();
    std::vector<Bytes> old_tensors, new_tensors;
    for (size_t i = 0; i < numels.size(); ++i) old_tensors.push_back(next<uint8_t>());
    for (size_t i = 0; i < numels.size(); ++i) new_tensors.push_back(next<uint8_t>());
    for (int64_t patch = 0; patch < kind[0]; ++patch) {
      PatchArguments args;
      args.element_size = static_cast<int>(kind[1]);
      args.is_float = kind[2] != 0;
      args.class_shift = static_cast<int>(kind[3]);
      args.count = static_cast<int64_t>(numels.size());
      args.numels = numels.data();
      std::vector<int64_t> first_tile = {0};
      for (const int64_t numel : numels) {
        first_tile.push_back(first_tile.back() + (numel + kPatchTile - 1) / kPatchTile);
      }
      args.first_tile = first_tile.data();

      auto sizes = next<uint32_t>();
      const auto offsets = next<int64_t>();
      auto records = next<uint8_t>();
      const auto row_of = next<uint16_t>(), rows = next<uint16_t>();
      const auto class_table = next<uint8_t>();
      const auto values = next<uint16_t>();
      args.row_of = row_of.data();
      args.rows = rows.data();
      args.class_table = class_table.data();
      args.values = values.data();
      args.row_count = static_cast<int>(rows.size() / kClasses);
      args.value_tables = static_cast<int>(values.size() / patch_symbols(args.element_size));
      args.sizes = sizes.data();

      std::vector<Bytes> dense = old_tensors;
      std::vector<void*> dense_at = pointers(dense), new_at = pointers(new_tensors);
      args.old_tensors = dense_at.data();
      if (patch == 0) {
        args.new_tensors = new_at.data();
        std::vector<int64_t> changes(numels.size());
        args.changes = changes.data();
        Bytes written;
        for (const Bytes& piece : cpu::patch_encode(args, serially)) {
          written.insert(written.end(), piece.begin(), piece.end());
        }
        require(written == records, "the encoder writes another record");
        args.new_tensors = nullptr;
      }
      args.offsets = offsets.data();
      args.records = records.data();
      args.record_bytes = static_cast<int64_t>(records.size());
      std::vector<int64_t> bad_tile = {args.tiles()};
      args.bad_tile = bad_tile.data();
      cpu::patch_apply(args, serially);
      require(patch > 0 || dense == new_tensors, "a sound patch decodes to other words");
      std::printf("%lld\n", static_cast<long long>(bad_tile[0]));
    }
  }
}
