"""SparseAdamW under accelerate: prepare, accumulate, save_state and load_state.

python examples/with_accelerate.py --density 0.05
python examples/with_accelerate.py --stop_at 4 --checkpoint run
python examples/with_accelerate.py --resume run

`accelerator.clip_grad_norm_` reads `param.grad`, which is None here, and clips nothing: use `max_grad_norm=`.
Move the model to `accelerator.device` before you build the optimizer: `prepare` would move the weights alone.
One process: DistributedDataParallel reduces `param.grad`, which needs `grads="dense"`.
Under mixed_precision="fp16" accelerate scales the loss, and the optimizer needs `amp_scaling=True`.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sparse_opt import MaskSet, SparseAdamW


def main(argv: list[str] | None = None) -> PreTrainedModel:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder; without it a small Llama with random weights")
    parser.add_argument("--mask", help="a mask file; without it a random mask")
    parser.add_argument("--density", type=float, default=0.1, help="of the random mask")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of the whole run")
    parser.add_argument("--stop_at", type=int, help="stop after this step, as if interrupted")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--checkpoint", help="folder to save to when the run stops")
    parser.add_argument("--resume", help="folder to resume from")
    args = parser.parse_args(argv)

    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    model.to(accelerator.device)
    mask = MaskSet.load(args.mask, model) if args.mask else MaskSet.random(model, density=args.density)
    sparse = SparseAdamW(model, mask, lr=1e-3, max_grad_norm=args.max_grad_norm)
    schedule = torch.optim.lr_scheduler.LinearLR(sparse, 1.0, 0.1, total_iters=args.steps)
    seeds = [torch.Generator().manual_seed(i) for i in range(args.steps * args.accumulate)]
    batches = [torch.randint(model.config.vocab_size, (4, 32), generator=seed) for seed in seeds]
    loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, sparse, loader, schedule)

    step = 0
    if args.resume:
        accelerator.load_state(args.resume)
        step = schedule.scheduler.last_epoch
        loader = skip_first_batches(loader, step * args.accumulate)
    for (tokens,) in loader:
        if step == args.stop_at:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.print(f"step {step}  loss {loss.item():.4f}  grad norm {sparse.grad_norm:.3f}")

    if args.checkpoint:
        accelerator.save_state(args.checkpoint)
    held, dense = sum(sparse.nbytes().values()), 3 * sum(p.nbytes for p in model.parameters())
    accelerator.print(f"{held:,} bytes of state and gradients; torch.optim.AdamW: {dense:,}; saved: {dense - held:,}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()
