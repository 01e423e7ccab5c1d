"""TRL's trainers under a mask: `sparse-opt train sft | dpo | grpo`, and callbacks for any transformers Trainer."""
