// Calls the native ops for the optimizers: directly in _kernels, without the dispatcher and the stable ABI's boxing; or
// through the dispatcher if a dispatch mode is active on this thread, so that the mode sees them. Profilers see both.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

#include "kernel_table.h"

namespace sparse_opt::direct {

// The table of the loaded _kernels, which the module sets as it is imported.
void set_table(const KernelTable& table);
const KernelTable& table();

// The step op `op`, with all arguments of its schema. `check_only` has been put among them.
void step(const c10::OperatorHandle& op, torch::jit::Stack arguments);

void masked_grad_gather_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                         at::IntArrayRef ends, const std::optional<at::Tensor>& scale, bool accumulate,
                         const std::optional<at::Tensor>& sum_sq, const std::optional<at::Tensor>& found_inf,
                         int64_t run_length, const std::optional<at::Tensor>& index_bases);
void indexed_replace_(at::TensorList dense, const at::Tensor& before, const at::Tensor& after,
                      const at::Tensor& indices, at::IntArrayRef starts, at::IntArrayRef ends, int64_t run_length,
                      const std::optional<at::Tensor>& index_bases);
void indexed_swap_(at::TensorList dense, const at::Tensor& compact, const at::Tensor& indices, at::IntArrayRef starts,
                   at::IntArrayRef ends, int64_t run_length, const std::optional<at::Tensor>& index_bases);
void gather_partly_(const at::Tensor& out, at::TensorList dense, const at::Tensor& indices, at::IntArrayRef starts,
                    at::IntArrayRef ends, at::IntArrayRef numbers, int64_t of, bool accumulate,
                    const at::Tensor& partial_sums, at::IntArrayRef first_partials,
                    const std::optional<at::Tensor>& found_inf, int64_t run_length,
                    const std::optional<at::Tensor>& index_bases);
void tile_weight_grad_(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                       const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size,
                       bool accumulate, const at::Tensor& sum_sq, const std::optional<at::Tensor>& found_inf);
void tile_weight_grad_partly_(const at::Tensor& out, at::TensorList grad_outputs, at::TensorList inputs,
                              const at::Tensor& tiles, at::IntArrayRef starts, at::IntArrayRef ends, int64_t tile_size,
                              bool accumulate, const at::Tensor& partial_sums, at::IntArrayRef first_partials,
                              const std::optional<at::Tensor>& found_inf);
void add_partial_sums_(const at::Tensor& sum_sq, const at::Tensor& partial_sums, at::IntArrayRef starts,
                       at::IntArrayRef ends);
void add_partial_sums_and_clip_(const at::Tensor& sum_sq, const at::Tensor& partial_sums, at::IntArrayRef starts,
                                at::IntArrayRef ends, const at::Tensor& clip, const at::Tensor& finished,
                                double max_norm);

}  // namespace sparse_opt::direct
