#include "../../rules/sgd.h"
#include "step.cuh"

template void sparse_opt::cuda::step<sparse_opt::Sgd>(const StepArguments&, const Sgd::Options&, Sgd::TensorScalars*,
                                                      cudaStream_t);
