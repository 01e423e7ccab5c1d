"""SparseAdamW under accelerate, in one process or several: prepare, accumulate, save_state and load_state.

python examples/with_accelerate.py --density 0.05
accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate.py --stop_at 4 --checkpoint run
ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 examples/with_accelerate.py --resume run

The optimizer averages the compact gradients itself, so the model is prepared without DistributedDataParallel, as for
evaluation. Every number of processes that divides ACCUMULATE gives the same result up to rounding.
`param.grad` is None: clip with `max_grad_norm=`, not `accelerator.clip_grad_norm_`; under fp16 add `amp_scaling=True`.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from sparse_opt import MaskSet, SparseAdamW

STEPS, ACCUMULATE = 8, 4  # of the whole run; micro-batches in a step, of all processes together


def main(argv: list[str] | None = None) -> PreTrainedModel:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "mask", "checkpoint", "resume"):
        parser.add_argument(f"--{name}", help="folder or model name; without it random weights, a random mask, no file")
    parser.add_argument("--density", type=float, default=0.1, help="of the random mask")
    parser.add_argument("--stop_at", type=int, default=STEPS, help="stop after this step, as if interrupted")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    args = parser.parse_args(argv)

    accelerator = Accelerator()
    accelerator.gradient_accumulation_steps = ACCUMULATE // accelerator.num_processes
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    model.to(accelerator.device)  # before the optimizer is built: `prepare` would move the weights alone
    mask = MaskSet.load(args.mask, model) if args.mask else MaskSet.random(model, density=args.density)
    sparse = SparseAdamW(model, mask, lr=1e-3, max_grad_norm=args.max_grad_norm, process_group=dist.group.WORLD)
    schedule = torch.optim.lr_scheduler.LinearLR(sparse, 1.0, 0.1, total_iters=STEPS)
    seeds = [torch.Generator().manual_seed(i) for i in range(STEPS * ACCUMULATE)]
    batches = [torch.randint(model.config.vocab_size, (4, 32), generator=seed) for seed in seeds]
    loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=4)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader = accelerator.prepare(sparse, loader)
    accelerator.register_for_checkpointing(schedule)  # `prepare` would step it once for each process
    step = 0
    if args.resume:
        accelerator.load_state(args.resume)
        step = schedule.last_epoch
        loader = skip_first_batches(loader, step * accelerator.gradient_accumulation_steps)
    for (tokens,) in loader:
        if step == args.stop_at:
            break
        with accelerator.accumulate(model), nullcontext() if accelerator.sync_gradients else sparse.no_sync():
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()
            step += 1
            accelerator.print(f"step {step}  loss {loss.item():.4f}  grad norm {sparse.grad_norm:.3f}")
    if args.checkpoint:
        accelerator.save_state(args.checkpoint)
    held, dense = sum(sparse.nbytes().values()), 3 * sum(p.nbytes for p in model.parameters())
    accelerator.print(f"{held:,} bytes of state and gradients; torch.optim.AdamW: {dense:,}; saved: {dense - held:,}")
    return model


if __name__ == "__main__":
    main()
