"""Benchmark of verl's actor update: the sparse engine compared with verl's own FSDP2 engine."""

# Device -> environment variables that verl reads when it is imported. verl has no platform for the CPU, and registers
# its engines for GPUs alone, where VERL_ENGINE_DEVICE finds them.
ENVIRONMENTS = {
    "cpu": {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "sparse_opt.bench.verl.cpu_platform,sparse_opt.integrations.verl",
    },
    "cuda": {
        "VERL_PLATFORM": "nvidia",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "sparse_opt.integrations.verl",
    },
}
