#include "../../rules/adamw.h"
#include "step.cuh"

template void sparse_opt::cuda::step<sparse_opt::AdamW>(const StepArguments&, const AdamW::Options&,
                                                        AdamW::TensorScalars*, cudaStream_t);
