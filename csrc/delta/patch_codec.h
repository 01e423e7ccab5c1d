// The patch codec of docs/formats.md. Tiles are independent, so the records do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "common/arguments.h"
#include "patch.h"

namespace sparse_opt::cpu {

// Returns what is wrong with the tables of an encode call at `tight`; null if nothing is, and at other levels.
const char* patch_tables_fault(const PatchArguments& args);

// Writes heads and sizes, and adds to args.changes. The records are the concatenation of the returned pieces.
std::vector<std::vector<uint8_t>> patch_encode(const PatchArguments& args, ParallelFor parallel_for);

void patch_sample(const PatchArguments& args, const PatchSample& sample, ParallelFor parallel_for);

// Stays within the records and the tensors, whatever heads, sizes, offsets, records and tables contain, and whatever
// their alignment; the tensors are aligned. Writes the tensors and bad_tile only. The words of a damaged tile are
// undefined afterwards; all other tiles are decoded.
void patch_apply(const PatchArguments& args, ParallelFor parallel_for);

}  // namespace sparse_opt::cpu
