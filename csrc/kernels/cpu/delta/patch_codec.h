// The patch codec of docs/formats.md. Tiles are independent, so the records do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "../../delta/patch.h"
#include "../kernels.h"

namespace sparse_opt::cpu {

// What is wrong with the tables of a call at `tight` that is to encode, or null; null at other levels.
const char* patch_tables_fault(const PatchArguments& args);

// Adds to changes. The level is not `tight`.
void count_changes(const PatchArguments& args, ParallelFor parallel_for);

// Fills heads and sizes, and adds to changes. The records are those of the result's pieces, one behind the other.
std::vector<std::vector<uint8_t>> patch_encode(const PatchArguments& args, ParallelFor parallel_for);

void patch_sample(const PatchArguments& args, const PatchSample& sample, ParallelFor parallel_for);

// Reads nothing outside of records, whatever these, heads, sizes, offsets and the tables hold and wherever they begin,
// and writes nothing but the tensors, which are aligned, and bad_tile. The words of a damaged tile are void, those of
// the others are decoded.
void patch_apply(const PatchArguments& args, ParallelFor parallel_for);

}  // namespace sparse_opt::cpu
