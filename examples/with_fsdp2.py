"""SparseAdamW on a model sharded by FSDP2 (`fully_shard`); checkpoints are those of torch.distributed.checkpoint.

torchrun --nproc_per_node=2 examples/with_fsdp2.py
torchrun --nproc_per_node=2 examples/with_fsdp2.py --mask mask.safetensors --stop_at 4 --checkpoint run
torchrun --nproc_per_node=4 examples/with_fsdp2.py --mask mask.safetensors --resume run

Shard the model before you build the optimizer, which then averages the compact gradients over the model's mesh, and
keeps the state of its own rows. Every number of processes that divides ACCUMULATE gives the same result up to rounding.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sparse_opt import MaskSet, SparseAdamW
from sparse_opt.distributed import load_optimizer

STEPS, ACCUMULATE = 8, 4  # of the whole run; micro-batches in a step, of all processes together


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "mask", "checkpoint", "resume"):
        parser.add_argument(f"--{name}", help="file or model name; without it random weights, a random mask, no file")
    parser.add_argument("--density", type=float, default=0.1, help="of the random mask")
    parser.add_argument("--stop_at", type=int, default=STEPS, help="stop after this step, as if interrupted")
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    args = parser.parse_args(argv)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)  # the same weights, and the same random mask, in every process
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    mask = MaskSet.load(args.mask, model) if args.mask else MaskSet.random(model, density=args.density)
    for module in [*model.model.layers, model]:
        fully_shard(module)
    optimizer = SparseAdamW(model, mask, lr=1e-3, max_grad_norm=args.max_grad_norm)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    run = {"model": model.state_dict(), "schedule": schedule.state_dict(), "step": 0}
    if args.resume:
        dcp.load(run, checkpoint_id=args.resume)  # writes into the model's shards
        load_optimizer(optimizer, args.resume)
        schedule.load_state_dict(run["schedule"])
    for step in range(run["step"], args.stop_at):
        own = range(step * ACCUMULATE + rank, (step + 1) * ACCUMULATE, ranks)
        for micro in own:
            generator = torch.Generator().manual_seed(micro)
            tokens = torch.randint(model.config.vocab_size, (4, 32), generator=generator).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            with nullcontext() if micro == own[-1] else optimizer.no_sync():  # average once, in the last backward pass
                (loss / len(own)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}  grad norm {optimizer.grad_norm:.3f}")
    if args.checkpoint:
        run |= {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "step": args.stop_at}
        dcp.save(run, checkpoint_id=args.checkpoint)
    if rank == 0:
        held, dense = sum(optimizer.nbytes().values()), 3 * sum(p.to_local().nbytes for p in model.parameters())
        print(f"{held:,} bytes of state and gradients; torch.optim.AdamW: {dense:,}; saved: {dense - held:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
