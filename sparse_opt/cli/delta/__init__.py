"""`sparse-opt delta ACTION`: list, verify, reconstruct, export, squash and convert delta logs."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from ..parser import CommandParser, add_json_flag
from .rebuild import reconstruct as reconstruct

# Copies of the names in delta.codec and of state dict dtypes, which cannot be imported without torch.
LEVELS = ("fast", "packed", "tight")
DTYPES = ("stored", "bfloat16", "float16", "float32")

# Action -> the module of this package that implements it.
_ACTIONS = {
    "list": "show",
    "info": "show",
    "verify": "upkeep",
    "squash": "upkeep",
    "convert": "upkeep",
    "reconstruct": "rebuild",
    "export": "rebuild",
}
_EPILOG = """DIR is a delta log, or a folder of base_state.pt and deltas_step_*.pt as other tools write them (squash
takes delta logs alone). docs/delta_logs.md is the guide.

examples:
  sparse-opt delta list --delta_log_dir delta_logs_M
  sparse-opt delta verify --delta_log_dir delta_logs_M
  sparse-opt delta reconstruct --model_name M --delta_log_dir delta_logs_M --step 50 --output_dir step_50
  sparse-opt delta convert --from old_deltas --to delta_logs_M --level tight
"""
_LIST_EPILOG = """'changed' counts the elements whose bits differ from those of the step before (in a log that codes
against its base, from the base's); 'B/change' is the step's bytes over them. Of a folder of .pt files every file is
read for that.

examples:
  sparse-opt delta list --delta_log_dir delta_logs_M
  sparse-opt delta list --delta_log_dir delta_logs_M --json | jq .totals
"""
_INFO_EPILOG = """Without --step: what the log says of itself and of its tensors. With --step: the step's state is
compared with that of the step before, tensor by tensor.

examples:
  sparse-opt delta info --delta_log_dir delta_logs_M
  sparse-opt delta info --delta_log_dir delta_logs_M --step 50 --largest 20
"""
_VERIFY_EPILOG = """Rebuilds every step and compares every digest; of .pt files, the checksums of their records and
their tensors' names and shapes. Exit code 1 if a file is broken; the steps that are lost with it are named.

examples:
  sparse-opt delta verify --delta_log_dir delta_logs_M
"""
_SQUASH_EPILOG = """The steps strictly between --from and --to are deleted, and --to is coded against --from. All other
steps keep their bits, and at every moment of it the log can be opened.

examples:
  sparse-opt delta squash --delta_log_dir delta_logs_M --from 100 --to 200
"""
_CONVERT_EPILOG = """Every step gets the bits that the source gives for it. A folder of .pt files is read as base +
difference, added in fp32 and kept in the dtype of its base, which is fp32 as a rule: --dtype bfloat16 keeps the same
values of a bf16 model in half the bytes, and stops where a value has no exact bf16 form. A delta log is written anew
at another level.

examples:
  sparse-opt delta convert --from deltas --to delta_logs_M --dtype bfloat16 --model_name M
  sparse-opt delta convert --from delta_logs_M --to archive_M --level tight
"""
_RECONSTRUCT_EPILOG = """--model_name gives the architecture and the tokenizer; every weight comes from the log, bit for
bit. Of .pt files, which lack buffers, those are the model's.

examples:
  sparse-opt delta reconstruct --model_name M --delta_log_dir delta_logs_M --step 50 --output_dir step_50
  sparse-opt delta reconstruct --model_name M --delta_log_dir deltas --dtype bfloat16 --step 50 --output_dir step_50
"""
_EXPORT_EPILOG = """formats:
  state   the whole state, dense, as one .safetensors file: what loads checkpoints loads it
  values  what changed since --since (the step before): NAME.indices, flat positions (int32), and NAME.values, the
          new values, in one .safetensors file: grail's sparse updates have these keys, vLLM's CheckpointWeightPatch
          takes them as they are
  pt      base_state.pt and deltas_step_N.pt in a new folder, fp32 differences to the base, as mask finders read them;
          elements that a difference cannot give back are counted

examples:
  sparse-opt delta export --delta_log_dir delta_logs_M --step 50 --format values --output step_50.safetensors
  sparse-opt delta export --delta_log_dir delta_logs_M --step 50 --since 0 --format values --output all.safetensors
  sparse-opt delta export --delta_log_dir delta_logs_M --step 50 100 --format pt --output deltas/
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
        description="Delta logs: the weights of a run, step by step, bit for bit.",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{" + ",".join(_ACTIONS) + "}")

    listing = actions.add_parser("list", help="every step: its kind, what changed, its size", epilog=_LIST_EPILOG)
    _add_log(listing)
    _add_pt_choice(listing)

    info = actions.add_parser("info", help="the log's tensors, or what one step changed", epilog=_INFO_EPILOG)
    _add_log(info)
    info.add_argument("--step", type=int, metavar="N", help="logged step")
    info.add_argument("--largest", type=int, default=10, metavar="K", help="tensors to list (%(default)s)")
    _add_pt_choice(info)

    verify = actions.add_parser("verify", help="rebuild every step and compare its digest", epilog=_VERIFY_EPILOG)
    _add_log(verify)
    _add_pt_choice(verify)

    rebuild = actions.add_parser("reconstruct", help="a step as a checkpoint", epilog=_RECONSTRUCT_EPILOG)
    _add_log(rebuild)
    rebuild.add_argument("--model_name", required=True, metavar="M", help="the logged model: hub name or local folder")
    rebuild.add_argument("--step", type=int, required=True, metavar="N", help="logged step")
    rebuild.add_argument("--output_dir", type=Path, required=True, metavar="DIR", help="new or empty folder")
    _add_pt_choice(rebuild)

    squash = actions.add_parser("squash", help="forget the steps between two", epilog=_SQUASH_EPILOG)
    _add_log(squash)
    squash.add_argument("--from", dest="first", type=int, required=True, metavar="A", help="logged step that stays")
    squash.add_argument("--to", dest="last", type=int, required=True, metavar="B", help="later one that stays")

    export = actions.add_parser("export", help="a step as files that others read", epilog=_EXPORT_EPILOG)
    _add_log(export)
    export.add_argument("--step", type=int, nargs="+", required=True, metavar="N", help="logged step; of pt, several")
    export.add_argument("--format", choices=("state", "values", "pt"), required=True, help="see below")
    export.add_argument("--since", type=int, metavar="N", help="of values: changes since this logged step")
    export.add_argument(
        "--output", type=Path, required=True, metavar="PATH", help=".safetensors file; of pt, new folder"
    )
    _add_pt_choice(export)

    convert = actions.add_parser("convert", help="any log as a new delta log", epilog=_CONVERT_EPILOG)
    convert.add_argument("--from", dest="delta_log_dir", type=Path, required=True, metavar="DIR", help="log to read")
    convert.add_argument("--to", dest="output_dir", type=Path, required=True, metavar="DIR", help="new or empty folder")
    convert.add_argument("--level", choices=LEVELS, help="how small patches are (of a delta log, its own; else packed)")
    convert.add_argument(
        "--keyframe_every", type=int, metavar="K", help="a whole state every K steps (likewise; else the first alone)"
    )
    convert.add_argument("--model_name", metavar="M", help="kept with the log as the model's name")
    _add_pt_choice(convert)
    add_json_flag(convert)
    return parser


def _add_log(parser: ArgumentParser) -> None:
    parser.add_argument("--delta_log_dir", type=Path, required=True, metavar="DIR", help="the delta log")
    add_json_flag(parser)


def _add_pt_choice(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("folders of .pt files")
    group.add_argument("--base_state", type=Path, metavar="FILE", help="the base, if not DIR/base_state.pt")
    group.add_argument(
        "--against",
        choices=("base", "previous"),
        help="what the differences were taken to; the files do not tell (base, as all known tools do)",
    )
    group.add_argument("--dtype", choices=DTYPES, help="dtype of the states, for exact values alone (stored)")
