// The launchers of the optimizers' steps. `Rule` is an optimizer of rules/.
#pragma once

#include "common/arguments.h"
#include "common/rounding.h"

namespace sparse_opt {

// The arguments of a step that do not depend on the optimizer. Exactly one of grad and dense_grads is given; null is
// "not given" for the rest.
struct StepArguments {
  Segments segments;
  DType param_dtype = DType::kFloat32;
  DType grad_dtype = DType::kFloat32;
  DType state_dtype = DType::kFloat32;
  void* states[kMaxStates] = {};       // [nnz] each, as Rule::kStates lists them; null if not used
  const void* grad = nullptr;          // [nnz]
  void* const* dense_grads = nullptr;  // [count], the list in host memory
  float* master = nullptr;             // [nnz]
  void* weights = nullptr;            // [nnz] of param_dtype: a copy of the parameters' active elements; no master then
  bool params_hold_master = false;    // the parameters' active elements are the rounded masters
  const float* lr = nullptr;          // [1]
  float* steps = nullptr;             // [count], 1 in the first step
  bool count_steps = false;           // add 1 to `steps` first, unless found_inf
  const float* clip_coef = nullptr;   // [1]
  const float* grad_scale = nullptr;  // [1]
  const float* found_inf = nullptr;   // [1]
  bool stochastic_rounding = false;
  uint64_t seed = 0;
};

namespace cpu {

template <typename Rule>
void step(const StepArguments& args, const typename Rule::Options& options, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

// `tensors`, [args.segments.count], is scratch memory on the device, which only this call reads and writes.
template <typename Rule>
void step(const StepArguments& args, const typename Rule::Options& options, typename Rule::TensorScalars* tensors,
          cudaStream_t stream);

}  // namespace cuda

}  // namespace sparse_opt
