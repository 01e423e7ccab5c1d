"""Sparse training in verl: a training engine whose optimizer trains the active elements of a mask under FSDP2.

verl imports this package in each of its processes if the environment says so, which registers the engine:

    export VERL_USE_EXTERNAL_MODULES=sparse_opt.integrations.verl
    python -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=sparse_fsdp2 \\
        +actor_rollout_ref.actor.optim.override_optimizer_config.mask=mask.safetensors ...

docs/verl.md has the options. Written for verl 0.9.1, of which nothing is patched: the engine is a subclass of verl's.
"""

from .engine import SparseFSDPEngine
from .options import SparseFSDPEngineConfig

__all__ = ["SparseFSDPEngine", "SparseFSDPEngineConfig"]
