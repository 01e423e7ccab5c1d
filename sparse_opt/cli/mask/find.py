"""`sparse-opt mask find`: find a mask in a delta log, or from the initial model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, MaskError, listed
from ...tables import table
from ..common import add_json_flag, add_tensor_choice, format_percent, print_json
from .output import PATTERNS, add_routers, headline, output_file, summary

if TYPE_CHECKING:
    import torch

    from ...mask_finding.select import FoundMask
    from ...masks.mask_set import MaskSet

# Copies of the names in mask_finding, which cannot be imported without torch.
LOG_METHODS = ("magnitude", "momentum", "fisher", "oracle")
CALIBRATION_METHODS = ("snip", "fisher_gradient", "wanda")
MODEL_METHODS = ("weight_magnitude", *CALIBRATION_METHODS)
_WITH_DATA = (*CALIBRATION_METHODS, "experts")

_EPILOG = """methods on a delta log (--delta_log_dir); W_0 is the first logged state, W_t that of the target step:
  magnitude   abs(W_t - W_0)
  momentum    abs(m) (1 + abs(m) / s), mean m and deviation s of the last steps' changes (--momentum_window)
  fisher      Var(W_i - W_0) + abs(mean(W_i - W_0)) over the logged steps up to t; a proxy
  oracle      magnitude at the last logged step

methods on a model before training (--model_name):
  weight_magnitude  abs(w)
methods on a model and a dataset (--dataset), one sequence at a time, with g the gradient of the mean loss of its
completion (of preference pairs, the chosen one):
  snip              abs(w mean(g))
  fisher_gradient   mean(g^2)
  wanda             abs(w) norm(x), x the input that w multiplies; scores only the weights of linear layers
  experts           whole experts of a mixture of experts, in each layer those with the highest shares of routed tokens,
                    or of the routers' weights (--expert_score weights), until these add up to --top_p; or
                    --experts_per_layer of them

Routers of experts stay frozen without --routers. A run or tile pattern keeps whole aligned units by the sum of their
scores, for the fast paths of the kernels. It is an error if a method needs more logged steps than there are. All
devices find the same mask in a delta log.

A mask at random: 'sparse-opt mask random'. How much a mask has in common with another: 'sparse-opt mask compare'.

--output is a file that ends in .safetensors, or a folder, where the file is named after sparsity, method and step:
sparsity_97.5pct_fisher_step50.safetensors, or top_10.0pct_momentum_w25_step25.safetensors with --top_percent.

examples:
  sparse-opt mask find --delta_log_dir delta_logs_M --sparsity_percent 97.5 --target_step 50 --output masks/
  sparse-opt mask find --delta_log_dir delta_logs_M --method momentum --momentum_window 25 --target_step 25 \\
      --top_percent 10 --output masks/
  sparse-opt mask find --delta_log_dir delta_logs_M --method fisher --pattern run32 --output masks/
  sparse-opt mask find --delta_log_dir delta_logs_M --mlp_only --pool tensor --output mlp.safetensors
  sparse-opt mask find --method snip --model_name M --dataset pairs.jsonl --n_samples 64 --output masks/
  sparse-opt mask find --method experts --model_name M --dataset task.jsonl --top_p 0.2 --output masks/
"""
# Options that only some methods take -> those methods, and the default value.
_BELONGING: dict[str, tuple[tuple[str, ...], Any]] = {
    "target_step": (LOG_METHODS, None),
    "momentum_window": (("momentum",), None),
    "dataset": (_WITH_DATA, None),
    "dataset_split": (_WITH_DATA, "train"),
    "n_samples": (_WITH_DATA, 128),
    "max_length": (_WITH_DATA, 1024),
    "dtype": (("weight_magnitude", *_WITH_DATA), "fp32"),
    "seed": (_WITH_DATA, 0),
    "expert_score": (("experts",), "tokens"),
    "top_p": (("experts",), None),
    "experts_per_layer": (("experts",), None),
    "min_tensor_keep": ((*LOG_METHODS, *MODEL_METHODS), 0.0025),
    "pool": ((*LOG_METHODS, *MODEL_METHODS), "global"),
}
# Options that mean nothing where whole experts are chosen.
_NOT_OF_EXPERTS = ("delta_log_dir", "sparsity_percent", "top_percent", "mlp_only")


def add_parser(actions: Any) -> None:
    """Add the action to those of `sparse-opt mask`."""
    find = actions.add_parser("find", help="find a mask in a delta log, or from the initial model", epilog=_EPILOG)
    methods = (*LOG_METHODS, *MODEL_METHODS, "experts")
    find.add_argument("--method", choices=methods, default="magnitude", metavar="METHOD", help="score (%(default)s)")
    find.add_argument("--delta_log_dir", type=Path, metavar="DIR", help="delta log of a dense run")
    find.add_argument(
        "--model_name", metavar="M", help="hub name or local folder; with a log: the model it must belong to"
    )
    size = find.add_mutually_exclusive_group()
    size.add_argument("--sparsity_percent", type=float, metavar="P", help="percent of inactive elements (90)")
    size.add_argument("--top_percent", type=float, metavar="P", help="instead: percent of active elements")
    find.add_argument("--target_step", type=int, metavar="N", help="logged step to score (the last)")
    find.add_argument("--momentum_window", type=int, metavar="W", help="changes to average (25, or all if fewer)")
    find.add_argument("--min_tensor_keep", type=float, metavar="SHARE", help="minimum share of every tensor (0.0025)")
    find.add_argument(
        "--pool",
        choices=("global", "tensor"),
        help="whether elements compete over all tensors or each tensor gets its own share (global)",
    )
    find.add_argument("--pattern", choices=PATTERNS, default="element", help="unit that is kept whole (%(default)s)")
    add_tensor_choice(find)
    add_routers(find)
    find.add_argument(
        "--expert_score", choices=("tokens", "weights"), help="share by which experts are chosen (tokens)"
    )
    experts = find.add_mutually_exclusive_group()
    experts.add_argument(
        "--top_p", type=float, metavar="P", help="share of the chosen experts in each layer (tokens 0.2, weights 0.1)"
    )
    experts.add_argument("--experts_per_layer", type=int, metavar="N", help="instead: experts in each layer")
    find.add_argument("--dataset", metavar="F", help="calibration data: hub name, or .json, .jsonl or .parquet file")
    find.add_argument("--dataset_split", metavar="NAME", help="split of a hub dataset (train)")
    find.add_argument("--n_samples", type=int, metavar="K", help="calibration sequences, drawn with --seed (128)")
    find.add_argument("--max_length", type=int, metavar="T", help="longest calibration sequence in tokens (1024)")
    find.add_argument("--dtype", choices=("fp32", "bf16"), help="dtype of the initial model (fp32)")
    find.add_argument("--seed", type=int, help="seed of the calibration sequences (0)")
    find.add_argument("--device", default="auto", help="device that computes scores: auto, cpu, cuda (%(default)s)")
    find.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help=".safetensors file, or folder (masks/NAME, NAME the last part of the log's or model's)",
    )
    add_json_flag(find)


def run(args: Namespace) -> None:
    """Find the mask, write it, and print a summary."""
    sparsity = _sparsity(args)
    _settle_options(args)
    from ...tensors import resolve_device

    device = resolve_device(args.device)
    if args.method == "experts":
        _find_experts(args, device)
        return
    output = args.output or Path("masks") / (args.delta_log_dir or Path(args.model_name)).resolve().name
    output_file(output, "")  # refuses an invalid path before the work
    names = ("include", "exclude", "mlp_only", "routers", "min_tensor_keep", "pool", "pattern")
    options: dict[str, Any] = {"progress": True, **{name: getattr(args, name) for name in names}}
    if args.method in LOG_METHODS:
        found = _in_log(args, sparsity, device, options)
    else:
        from . import from_model

        found = from_model.find(args, sparsity, device, options)
    path = output_file(output, _file_name(args, sparsity, found.mask))
    found.mask.save(path)
    if args.json:
        print_json({"file": path, **summary(found.mask), "threshold": found.threshold})
    else:
        print(f"{path}\n{headline(found.mask)}")


def _find_experts(args: Namespace, device: torch.device) -> None:
    from ...mask_finding.experts import TOP_P
    from . import from_model

    output = args.output or Path("masks") / Path(args.model_name).resolve().name
    top_p = TOP_P[args.expert_score] if args.top_p is None else args.top_p
    size = f"p{top_p:g}" if args.experts_per_layer is None else f"{args.experts_per_layer}_a_layer"
    path = output_file(output, f"experts_{args.expert_score}_{size}.safetensors")
    found = from_model.find_experts(args, device)
    found.mask.save(path)
    chosen = {str(layer): list(numbers) for layer, numbers in found.experts.items()}
    if args.json:
        shares = {
            kind: {str(layer): of.tolist() for layer, of in getattr(found.shares, kind).items()}
            for kind in ("tokens", "weights")
        }
        print_json({"file": path, **summary(found.mask), "experts": chosen, "shares": shares})
        return
    of_score = getattr(found.shares, args.expert_score)
    rows = [
        (
            layer,
            str(len(numbers)),
            format_percent(float(of_score[int(layer)][numbers].sum())),
            listed([*map(str, numbers)], most=12),
        )
        for layer, numbers in chosen.items()
    ]
    shown = table(("layer", "experts", f"share of {args.expert_score}", "numbers"), rows, n_last_words=1)
    print("\n".join([str(path), headline(found.mask), "", shown]))


def _sparsity(args: Namespace) -> float:
    name = "sparsity_percent" if args.top_percent is None else "top_percent"
    percent = 90.0 if args.sparsity_percent is None else args.sparsity_percent
    percent = percent if args.top_percent is None else args.top_percent
    if not 0.0 < percent < 100.0:
        raise ConfigError(f"option '{name}' is {percent}: expected more than 0 and less than 100")
    # Rounded, because 100 - 2.4 is not exactly 97.6 in floating point.
    return percent if args.top_percent is None else round(100.0 - percent, 10)


def _settle_options(args: Namespace) -> None:
    """Raise ConfigError for options that are not valid with the method, and set the defaults of the others."""
    method = args.method
    for name, (methods, default) in _BELONGING.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif method not in methods:
            raise ConfigError(f"option '{name}' is not valid with method '{method}', only with {', '.join(methods)}")
    for name, least in (("n_samples", 1), ("max_length", 2), ("momentum_window", 2), ("experts_per_layer", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"option '{name}' is {value}: expected {least} or more")
    if args.top_p is not None and not 0.0 < args.top_p <= 1.0:
        raise ConfigError(f"option 'top_p' is {args.top_p}: expected more than 0, at most 1")
    if not 0.0 <= args.min_tensor_keep <= 1.0:
        raise ConfigError(f"option 'min_tensor_keep' is {args.min_tensor_keep}: expected 0 to 1")
    if method in LOG_METHODS and args.delta_log_dir is None:
        raise ConfigError(f"method '{method}' needs --delta_log_dir, the delta log of a dense run")
    if method in (*MODEL_METHODS, "experts") and args.model_name is None:
        raise ConfigError(f"method '{method}' needs --model_name")
    if method == "experts":
        for name in _NOT_OF_EXPERTS:
            if getattr(args, name):
                raise ConfigError(f"option '{name}' is not valid with method 'experts'")
        if args.pattern != "element":
            raise ConfigError("option 'pattern' is not valid with method 'experts', which chooses whole experts")
    if method in _WITH_DATA and args.dataset is None:
        raise ConfigError(f"method '{method}' needs --dataset, the calibration data")
    if method in MODEL_METHODS and args.delta_log_dir is not None:
        raise ConfigError(f"option 'delta_log_dir' is not valid with method '{method}', which finds no mask in a log")


def _in_log(args: Namespace, sparsity: float, device: torch.device, options: dict[str, Any]) -> FoundMask:
    from ...delta.log import DeltaLog
    from ...mask_finding.find import find_from_log

    log = DeltaLog.open(args.delta_log_dir)
    if args.model_name is not None:
        from .from_model import parameter_shapes

        shapes = parameter_shapes(args.model_name)
        for spec in log.layout.tensors:
            if spec.name not in log.layout.buffers and (found := shapes.get(spec.name)) != spec.shape:
                raise MaskError(
                    f"{log.directory}: not a log of {args.model_name}: {spec.name} is {list(spec.shape)} in the log, "
                    f"{'absent' if found is None else list(found)} in the model"
                )
    steps = {"target_step": args.target_step, "momentum_window": args.momentum_window}
    result = find_from_log(log, method=args.method, sparsity=sparsity, device=device, **steps, **options)
    if args.model_name is not None:
        result.mask.metadata.setdefault("model", args.model_name)
    return result


def _file_name(args: Namespace, sparsity: float, mask: MaskSet) -> str:
    """`sparsity_97.5pct_fisher_run32_step50.safetensors`, `top_10.0pct_momentum_w25_step25.safetensors`, ..."""
    size = f"sparsity_{float(sparsity)}" if args.top_percent is None else f"top_{float(args.top_percent)}"
    parts = [f"{size}pct", args.method]
    if "momentum_window" in mask.metadata:
        parts.append(f"w{mask.metadata['momentum_window']}")
    if args.pattern != "element":
        parts.append(args.pattern)
    if "step" in mask.metadata:
        parts.append(f"step{mask.metadata['step']}")
    return "_".join(parts) + ".safetensors"
