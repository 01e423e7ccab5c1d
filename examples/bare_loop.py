"""SparseAdamW in a PyTorch loop: accumulation, clipping, a schedule, saving and resuming.

python examples/bare_loop.py
python examples/bare_loop.py --model gpt2 --density 0.05 --checkpoint run.pt
python examples/bare_loop.py --mask mask.safetensors --stop_at 4 --checkpoint run.pt
python examples/bare_loop.py --mask mask.safetensors --resume run.pt

`param.grad` stays None: a hook gathers the active part of each gradient when autograd produces it, and frees the rest.
torch.nn.utils.clip_grad_norm_ therefore clips nothing: use `max_grad_norm=` or `optimizer.clip_grad_norm_`.
"""

from __future__ import annotations

import argparse

import torch
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
    parser.add_argument("--checkpoint", help="file to save to when the run stops")
    parser.add_argument("--resume", help="file to resume from")
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    model.to(device)  # before the optimizer is built, because it keeps its state on the weights' device
    mask = MaskSet.load(args.mask, model) if args.mask else MaskSet.random(model, density=args.density)
    optimizer = SparseAdamW(model, mask, lr=1e-3, max_grad_norm=args.max_grad_norm)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)

    first = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first = saved["step"]

    stop = args.stop_at or args.steps
    for step in range(first, stop):
        total = 0.0
        for micro in range(args.accumulate):
            generator = torch.Generator().manual_seed(step * args.accumulate + micro)
            tokens = torch.randint(model.config.vocab_size, (4, 32), generator=generator).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss / args.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {step + 1}  loss {total:.4f}  grad norm {optimizer.grad_norm:.3f}")

    if args.checkpoint:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**states, "step": stop}, args.checkpoint)
    held, dense = sum(optimizer.nbytes().values()), 3 * sum(p.nbytes for p in model.parameters())
    print(f"{held:,} bytes of state and gradients; torch.optim.AdamW: {dense:,}; saved: {dense - held:,}")
    return model


if __name__ == "__main__":
    main()
