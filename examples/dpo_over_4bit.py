"""DPO with TRL over a base in 4 bits: of each weight, the active elements are trained in bf16.

python examples/dpo_over_4bit.py --model Qwen/Qwen3-8B --dataset trl-lib/ultrafeedback_binarized --output_dir run

It needs bitsandbytes. `run` has the merged weights in bf16, which vLLM and transformers load, and `run/delta` the
change, for the same base in 4 bits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer

from sparse_opt import RandomMask
from sparse_opt.integrations import sparse_trainer


def main(argv: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or name of a model that is not quantised")
    parser.add_argument("--dataset", required=True, help="pairs in TRL's format: a name on the hub, or a JSONL file")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--density", type=float, default=0.025, help="share of the weights that are trained")
    parser.add_argument("--max_steps", type=int, default=200)
    args = parser.parse_args(argv)

    is_file = args.dataset.endswith((".json", ".jsonl"))
    pairs = load_dataset("json", data_files=args.dataset) if is_file else load_dataset(args.dataset)
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16, quantization_config=quantisation)
    trainer = sparse_trainer(DPOTrainer)(
        model=model,
        mask=RandomMask(args.density, "tile64"),
        args=DPOConfig(
            output_dir=args.output_dir,
            max_steps=args.max_steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=8,
            gradient_checkpointing=True,
            learning_rate=3e-5,
            logging_steps=1,
            save_strategy="no",
            bf16=False,  # the model is in bf16 by itself
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=pairs["train"],
        processing_class=AutoTokenizer.from_pretrained(args.model),
    )
    trainer.train()
    trainer.save_model()
    trainer.sparse_optimizer.delta().save_pretrained(f"{args.output_dir}/delta")
    return trainer


if __name__ == "__main__":
    main()
