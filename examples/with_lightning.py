"""SparseAdamW under Lightning, with automatic or manual optimization; checkpoints are Lightning's own.

python examples/with_lightning.py --stop_at 2 --checkpoint a.ckpt && python examples/with_lightning.py --resume a.ckpt

`Trainer(gradient_clip_val=)` reads `param.grad`, which is None here, and clips nothing: use `max_grad_norm=`, or a
`configure_gradient_clipping` of the module that calls `optimizer.clip_grad_norm_(gradient_clip_val)`.
Lightning resumes exactly from the end of an epoch; from the middle of one it needs a loader with a state_dict.
One process: DDP needs `grads="dense", process_group=False`. Under precision="16-mixed" use `amp_scaling=True`.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sparse_opt import MaskSet, SparseAdamW

EPOCHS, STEPS, ACCUMULATE = 4, 2, 2  # of the whole run; optimizer steps in an epoch; micro-batches in a step


class SparseTuning(lightning.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.automatic_optimization = args, not args.manual
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        if args.model:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        else:
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def configure_optimizers(self) -> dict[str, object]:  # Lightning has moved the model to its device by now
        model, args = self.model, self.args
        mask = MaskSet.load(args.mask, model) if args.mask else MaskSet.random(model, density=args.density)
        optimizer = SparseAdamW(model, mask, lr=1e-3, max_grad_norm=args.max_grad_norm)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=EPOCHS * STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        first, vocab = self.current_epoch * STEPS * ACCUMULATE, self.model.config.vocab_size
        seeds = [torch.Generator().manual_seed(first + i) for i in range(STEPS * ACCUMULATE)]
        return torch.utils.data.DataLoader([torch.randint(vocab, (4, 32), generator=s) for s in seeds], batch_size=None)

    def training_step(self, tokens: torch.Tensor, i: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        print(f"epoch {self.current_epoch + 1}  batch {i + 1}  loss {loss.item():.4f}")
        if self.args.manual:
            self.manual_backward(loss / ACCUMULATE)
        if self.args.manual and (i + 1) % ACCUMULATE == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
        return loss


def main(argv: list[str] | None = None) -> torch.nn.Module:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "mask", "checkpoint", "resume"):
        parser.add_argument(f"--{name}", help="file or model name; without one random weights, a random mask, no file")
    parser.add_argument("--density", type=float, default=0.1, help="of the random mask")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--stop_at", type=int, default=EPOCHS, help="stop after this epoch, as if interrupted")
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    args = parser.parse_args(argv)
    module, accumulate = SparseTuning(args), 1 if args.manual else ACCUMULATE
    often = {"max_epochs": args.stop_at, "accumulate_grad_batches": accumulate, "reload_dataloaders_every_n_epochs": 1}
    trainer = lightning.Trainer(devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **often)
    trainer.fit(module, ckpt_path=args.resume)
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint)
    held, dense = sum(trainer.optimizers[0].nbytes().values()), 3 * sum(p.nbytes for p in module.model.parameters())
    print(f"{held:,} bytes of state and gradients; torch.optim.AdamW: {dense:,}; saved: {dense - held:,}")
    return module.model


if __name__ == "__main__":
    main()
