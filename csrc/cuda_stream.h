// The current device and stream of a GPU, through torch's C interface.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "stable_abi.h"

namespace sparse_opt {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}

// A function of libtorch_cuda, which a torch without CUDA does not have. It is looked up in the library that torch has
// loaded, so that this one loads with both; torch's libraries are not in the global scope of symbols.
inline AOTITorchError get_current_stream(int32_t device, void** stream) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Function>(library == nullptr ? nullptr
                                                         : dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (function == nullptr) throw std::runtime_error("sparse_opt: this torch has no CUDA");
  return function(device, stream);
}

// Makes the device current while it exists, and converts to its current stream.
class OnStream {
 public:
  explicit OnStream(int device) : guard_(device) {
    void* stream = nullptr;
    check_torch(get_current_stream(device, &stream), "return its current CUDA stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  operator cudaStream_t() const { return stream_; }  // NOLINT(google-explicit-constructor)

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace sparse_opt
