// The current device and stream of a GPU, through torch's C interface.
#pragma once

#include <cuda_runtime_api.h>

#include "stable_abi.h"

// Defined by libtorch_cuda, which a torch without CUDA does not have: the library loads there too, because the symbol
// is weak. Its CUDA kernels are never called then, because no tensor is on a GPU.
extern "C" AOTI_TORCH_EXPORT AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream)
    __attribute__((weak));

namespace sparse_opt {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}

// Makes the device current while it exists, and converts to its current stream.
class OnStream {
 public:
  explicit OnStream(int device) : guard_(device) {
    if (aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("sparse_opt: this torch has no CUDA");
    void* stream = nullptr;
    check_torch(aoti_torch_get_current_cuda_stream(device, &stream), "return its current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

inline Device gpu(int index) {
  return {DeviceType::CUDA, index};
}

}  // namespace sparse_opt
