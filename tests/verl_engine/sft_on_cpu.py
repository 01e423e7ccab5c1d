"""verl's SFT trainer in processes of a CPU.

verl asks for the backends of its two devices, "cpu:gloo,cpu:gloo" here, which torch refuses.
"""

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    import verl.utils.distributed

    verl.utils.distributed.initialize_global_process_group = lambda: None
    from verl.trainer.sft_trainer import main

    main()
