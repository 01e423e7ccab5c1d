// What the library _kernels offers to _autograd, which is compiled against one version of torch: the same checked calls
// without torch's boxing, which costs about 0.1 us for each tensor of a list. The table is passed in a capsule.
#pragma once

#include <cstdint>

#include "gather/gather.h"
#include "generated/rules.h"
#include "step/step.h"
#include "swap/swap.h"
#include "tiles/tiles.h"

namespace sparse_opt {

constexpr const char* kKernelTableCapsule = "sparse_opt._kernels.table";

#define SPARSE_OPT_NUMBER(Rule) k##Rule,
enum RuleNumber : int { SPARSE_OPT_FOR_EACH_RULE(SPARSE_OPT_NUMBER) kRuleCount };
#undef SPARSE_OPT_NUMBER

// All functions run on the current stream of the arguments' device, `device` of its type.
struct KernelTable {
  // Changes with the layout of the arguments or of this table.
  static constexpr int64_t kVersion = 5;

  int64_t version = kVersion;
  int64_t sizes = argument_sizes();

  struct OfDevice {
    void (*step[kRuleCount])(const StepArguments& args, const void* options, int device) = {};
    void (*gather)(const GatherArguments& args, int device) = nullptr;
    void (*tiles)(const TileArguments& args, int device) = nullptr;
    void (*swap)(const MoveArguments& args, int device) = nullptr;
    void (*replace)(const ReplaceArguments& args, int device) = nullptr;
  } cpu, cuda;

  // Gathers some tensors of a list; numbers[i] is the number of the call's tensor i in the list, and its partial sums
  // are written to partial_sums + first_partials[i].
  void (*gather_partly)(const GatherArguments& args, float* partial_sums, const int64_t* first_partials,
                        const int64_t* numbers, int device) = nullptr;
  void (*tiles_partly)(const TileArguments& args, float* partial_sums, const int64_t* first_partials,
                       int device) = nullptr;
  void (*sum_partials)(const Segments& segments, const float* partial_sums, float* sum_sq, const ClipArguments& clip,
                       int device) = nullptr;
  // Whether the current stream of a GPU is being captured in a CUDA graph.
  bool (*is_capturing)(int device) = nullptr;

  static constexpr int64_t argument_sizes() {
    return static_cast<int64_t>(sizeof(StepArguments) + (sizeof(GatherArguments) << 16) +
                                (sizeof(TileArguments) << 32) + (sizeof(Segments) << 48));
  }
};

}  // namespace sparse_opt
