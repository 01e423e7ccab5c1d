"""`sparse-opt delta ACTION`: work with delta logs, and with deltas, which are one change to share."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ...options import CommandParser
from ..common import add_json_flag

# Names of state dict dtypes, which cannot be imported without torch.
DTYPES = ("bfloat16", "float16", "float32")

# Action -> the module of this package that implements it.
_ACTIONS = {
    "list": "show",
    "info": "show",
    "verify": "maintenance",
    "convert": "maintenance",
    "reconstruct": "maintenance",
    "diff": "share",
    "apply": "share",
    "show": "share",
    "merge": "share",
    "push": "share",
}
_EPILOG = """DIR is a delta log. 'delta convert' makes one of a folder of base_state.pt and deltas_step_*.pt, as
other tools write them. docs/delta_logs.md explains both.

examples:
  sparse-opt delta list --delta_log_dir delta_logs_M
  sparse-opt delta verify --delta_log_dir delta_logs_M
  sparse-opt delta reconstruct --model_name M --delta_log_dir delta_logs_M --step 50 --output_dir step_50

A delta is the change between two checkpoints, as a folder: docs/sharing.md.

  sparse-opt delta diff BASE TUNED -o my-delta
  sparse-opt delta apply my-delta BASE -o tuned
"""
_LIST_EPILOG = """'changed' counts the elements whose bits differ from the previous step; 'B/change' is the bytes of
the step per changed element.

examples:
  sparse-opt delta list --delta_log_dir delta_logs_M
  sparse-opt delta list --delta_log_dir delta_logs_M --json | jq .totals
"""
_INFO_EPILOG = """What a step has changed: 'sparse-opt delta list', and by tensor 'sparse-opt analyze sparsity'.

examples:
  sparse-opt delta info --delta_log_dir delta_logs_M
"""
_VERIFY_EPILOG = """Rebuilds every step and compares every digest. If a file is damaged, the exit code is 1, and the
error names the file and the steps that cannot be rebuilt.

examples:
  sparse-opt delta verify --delta_log_dir delta_logs_M
"""
_CONVERT_EPILOG = """A folder of base_state.pt and deltas_step_*.pt is read as base + difference, added in fp32 and
stored in the dtype of the base, usually fp32. For a bf16 model, --dtype bfloat16 stores the same values in half the
bytes; a value that is not exact in bf16 is an error. A delta log is written with some of its steps, or
with other keyframes, with the same bits.

examples:
  sparse-opt delta convert --from deltas --to delta_logs_M --dtype bfloat16 --model_name M
  sparse-opt delta convert --from delta_logs_M --to some_M --steps 100 200 300
"""
_RECONSTRUCT_EPILOG = """--model_name provides the architecture and the tokenizer; every weight comes from the log, bit
for bit.

examples:
  sparse-opt delta reconstruct --model_name M --delta_log_dir delta_logs_M --step 50 --output_dir step_50
"""
_DIFF_EPILOG = """BASE and TUNED are checkpoints in safetensors files: folders, or names on the hub, with @revision.
Names, shapes and dtypes must agree. Holds one tensor of both in memory.

examples:
  sparse-opt delta diff HuggingFaceTB/SmolLM2-135M runs/sparse -o my-delta
"""
_APPLY_EPILOG = """Writes the trained checkpoint in the base's shards, with the base's configuration and tokenizer.
Every tensor of BASE is compared with its digest; if one differs, nothing is written. Holds two tensors in memory.

examples:
  sparse-opt delta apply my-delta HuggingFaceTB/SmolLM2-135M -o tuned
"""
_SHOW_EPILOG = """examples:
  sparse-opt delta show my-delta --largest 20
  sparse-opt delta show user/my-delta --json | jq .layers
"""
_MERGE_EPILOG = """Elements that one of the deltas changes get its bits. Elements that both change are an error or, with
--sum, become base + (a - base) + (b - base), added in fp32 and rounded once to the nearest number of their dtype.

examples:
  sparse-opt delta merge math code --base HuggingFaceTB/SmolLM2-135M -o both
"""
_PUSH_EPILOG = """Needs a login: hf auth login.

examples:
  sparse-opt delta push my-delta user/my-delta --private
"""


def run(argv: Sequence[str]) -> int:
    """Run one of the actions."""
    args = _parser().parse_words(argv)
    module = importlib.import_module(f".{_ACTIONS[args.action]}", __package__)
    getattr(module, f"run_{args.action}")(args)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="sparse-opt delta",
        description="Work with delta logs, the weights of a run step by step, and with deltas, one change to share.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{" + ",".join(_ACTIONS) + "}")

    listing = actions.add_parser("list", help="list every step: kind, changed elements, size", epilog=_LIST_EPILOG)
    _add_log(listing)

    info = actions.add_parser("info", help="show a log's settings and dtypes", epilog=_INFO_EPILOG)
    _add_log(info)

    verify = actions.add_parser("verify", help="rebuild every step and compare its digest", epilog=_VERIFY_EPILOG)
    _add_log(verify)

    rebuild = actions.add_parser("reconstruct", help="write a step as a checkpoint", epilog=_RECONSTRUCT_EPILOG)
    _add_log(rebuild)
    rebuild.add_argument("--model_name", required=True, metavar="M", help="the logged model: hub name or local folder")
    rebuild.add_argument("--step", type=int, required=True, metavar="N", help="logged step")
    rebuild.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="new or empty folder")

    convert = actions.add_parser(
        "convert",
        help="write .pt files, or some steps of a log, as a new log",
        epilog=_CONVERT_EPILOG,
    )
    convert.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR", help="log to read")
    convert.add_argument("--to", dest="output_dir", type=Path, required=True, metavar="DIR", help="new or empty folder")
    convert.add_argument(
        "--steps", type=int, nargs="+", metavar="N", help="logged steps to keep, besides the base (all)"
    )
    convert.add_argument(
        "--keyframe_every",
        type=int,
        metavar="K",
        help="whole state every K steps (that of a delta log, else the first only)",
    )
    convert.add_argument("--model_name", metavar="M", help="name of the model, stored in the log")
    convert.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of .pt files: dtype of the states; must hold all values exactly (that of the base)",
    )
    add_json_flag(convert)

    diff = actions.add_parser("diff", help="write what differs between two checkpoints", epilog=_DIFF_EPILOG)
    diff.add_argument("base", metavar="BASE", help="the checkpoint before training")
    diff.add_argument("tuned", metavar="TUNED", help="the checkpoint after it")
    _add_output(diff)

    apply = actions.add_parser("apply", help="write the checkpoint that a delta makes", epilog=_APPLY_EPILOG)
    apply.add_argument("delta", metavar="DELTA", help="the delta: a folder, or a name on the hub")
    apply.add_argument("base", metavar="BASE", nargs="?", help="its base: a folder, or a name on the hub (as it says)")
    _add_output(apply)

    show = actions.add_parser("show", help="show what a delta changes", epilog=_SHOW_EPILOG)
    show.add_argument("delta", metavar="DELTA", help="the delta: a folder, or a name on the hub")
    show.add_argument("--largest", type=int, default=10, metavar="K", help="tensors to list (%(default)s)")
    add_json_flag(show)

    merge = actions.add_parser("merge", help="write the delta that makes two changes", epilog=_MERGE_EPILOG)
    merge.add_argument("first", metavar="A", help="a delta")
    merge.add_argument("second", metavar="B", help="another one of the same base")
    merge.add_argument("--base", metavar="BASE", help="the base: a folder, or a name on the hub (as A says)")
    merge.add_argument("--sum", action="store_true", help="add the changes of elements that both change")
    _add_output(merge)

    push = actions.add_parser("push", help="upload a delta to the hub, with a model card", epilog=_PUSH_EPILOG)
    push.add_argument("delta", metavar="DELTA", help="the delta's folder")
    push.add_argument("repo", metavar="REPO", help="the repository, such as user/my-delta")
    push.add_argument("--private", action="store_true", help="make a new repository private")
    return parser


def _add_output(parser: ArgumentParser) -> None:
    parser.add_argument("--output_dir", "-o", type=Path, required=True, metavar="DIR", help="folder to write")
    add_json_flag(parser)


def _add_log(parser: ArgumentParser) -> None:
    parser.add_argument("--delta_log_dir", type=Path, required=True, metavar="DIR", help="the delta log")
    add_json_flag(parser)
