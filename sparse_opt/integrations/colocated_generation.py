"""TRL's generation with vLLM in the trainer's process, with options of `vllm.LLM` for which TRL has no arguments.

Written for TRL 1.16, whose `VLLMGeneration` passes fixed options to `vllm.LLM`. As with a server (server_updates.py),
the constructor of GRPOTrainer is called with `use_vllm=False`, and afterwards `start` makes a subclass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import ensure_master_addr_port

from ..errors import ConfigError
from .server_updates import use_generation


class ColocatedGeneration(VLLMGeneration):
    """TRL's generation in mode "colocate", without tensor parallelism and sleep mode.

    Args:
        llm_options: of `vllm.LLM`, in addition to TRL's.
        options: those of `VLLMGeneration`.

    Raises:
        ConfigError: TRL sets an option of `llm_options` itself; names it.
    """

    def __init__(self, llm_options: Mapping[str, Any], **options: Any) -> None:
        self._llm_options = llm_options
        super().__init__(mode="colocate", **options)

    def _init_vllm(self) -> None:
        from vllm import LLM

        of_trl = {
            "model": self.model.name_or_path,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "enable_sleep_mode": False,
            "model_impl": self.model_impl,
            "distributed_executor_backend": "external_launcher",
            "seed": self.accelerator.process_index,
            "max_num_batched_tokens": 4096,
            "logprobs_mode": "processed_logprobs",
            "trust_remote_code": self.trust_remote_code,
        }
        for name in self._llm_options:
            if name in of_trl:
                raise ConfigError(
                    f"vllm_options has {name!r}, which TRL sets to {of_trl[name]!r}; some are arguments of GRPOConfig"
                )
        # The launcher that vLLM finds itself in.
        os.environ["RANK"] = str(self.accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(self.accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(self.accelerator.num_processes)
        ensure_master_addr_port()
        self.llm = LLM(**of_trl, **self._llm_options)
        self._llm_weights_sleeping = False
        self.accelerator.wait_for_everyone()


def start(trainer: Any, llm_options: Mapping[str, Any]) -> None:
    """Start vLLM for a GRPOTrainer whose constructor was called `server_updates.without_vllm`.

    Raises:
        ConfigError: TRL sets an option of `llm_options` itself; names it.
    """
    args = trainer.args
    use_generation(
        trainer,
        ColocatedGeneration,
        llm_options=llm_options,
        model=trainer.model,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=args.per_device_train_batch_size * args.steps_per_generation,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
    )
