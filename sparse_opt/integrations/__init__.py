"""SparseAdamW in other people's trainers: transformers' Trainer, and TRL's SFTTrainer, DPOTrainer and GRPOTrainer.

    from sparse_opt.integrations import SparseArguments, sparse_trainer

    trainer = sparse_trainer(DPOTrainer)(model, args=args, train_dataset=rows, mask="mask.safetensors")

Nothing here is imported by `import sparse_opt`, and nothing of transformers or TRL by importing this: `sparse_trainer`
takes the class that is already loaded and makes a subclass of it. No function or class of theirs is changed.
"""

from .arguments import SparseArguments
from .factory import sparse_trainer

__all__ = ["SparseArguments", "sparse_trainer"]
