#include "../../rules/lion.h"
#include "step.cuh"

template void sparse_opt::cuda::step<sparse_opt::Lion>(const StepArguments&, const Lion::Options&, Lion::TensorScalars*,
                                                       cudaStream_t);
