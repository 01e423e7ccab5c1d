"""`sparse-opt train sft | dpo | grpo`: TRL's trainers, dense, under a mask, or with adapters."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOTrainer, GRPOTrainer, SFTTrainer, get_peft_config, get_quantization_config
from trl.trainer.utils import create_model_from_path

from ...errors import ConfigError, DataError, MaskError, SparseOptError
from ...files import one_line, write_text
from ...masks.mask_set import MaskSet
from ...options import FALSE, TRUE
from ...progress import hide_progress_bars
from ..callback import DeltaLogCallback
from ..checkpoints import CheckpointError
from ..factory import sparse_trainer
from ..rates import EXPONENT, dense_rate, rate_factor
from ..run_folder import last_checkpoint
from ..trainer import RunTrainer
from .command_line import Options, parse
from .console import LogWarnings, ProgressLines
from .data import Algorithm, RowsDigest, load_rows, require_dataset
from .margins import MARGINS_FOLDER, MarginsCallback, remove_after
from .memory import MemoryCallback
from .rewards import load_rewards
from .row_file import RowFile
from .tokenized_rows import check_tokenized
from .update_statistics import FILE as STATISTICS_FILE
from .update_statistics import UpdateStatisticsCallback

TRAINERS = {"sft": SFTTrainer, "dpo": DPOTrainer, "grpo": GRPOTrainer}
OPTIONS_FILE = "options.yaml"
MASK_FILE = "mask.safetensors"


def run(algorithm: Algorithm, argv: Sequence[str]) -> int:
    """Train as the words after `sparse-opt train ALGORITHM` say, and return 0; see `train` and `parse` for errors."""
    return train(algorithm, parse(algorithm, argv))


def train(
    algorithm: Algorithm,
    options: Options,
    *,
    rows: Any = None,
    test_rows: Any = None,
    rewards: Sequence[Any] | None = None,
    prepare: Callable[[Any], object] | None = None,
    ref_model: Any = None,
) -> int:
    """Train with TRL, save the model, and return 0.

    Args:
        rows, test_rows: `datasets.Dataset` to train on and to evaluate on; None loads those of the options.
        rewards: reward functions of GRPO; None loads those of the options.
        prepare: called with the trainer before training begins.
        ref_model: reference of a dense DPO run; None is the policy at the start.

    Raises:
        ConfigError: options contradict each other or the model.
        DataError: the rows, a checkpoint or a mask cannot be used.
        KeyboardInterrupt: Ctrl-C; the message says what was kept, and how to go on.
    """
    args = options.training
    checkpoint = _checkpoint(args)
    if rows is None:
        require_dataset(options.script.dataset_name)
    if rewards is None:
        rewards = load_rewards(options.script.reward_funcs or []) if algorithm == "grpo" else []
    config = _model_config(options)  # before a dataset and a mask are read
    mask, first_line = _mask_and_rate(options, config)
    is_main = args.process_index == 0
    if is_main:
        print(first_line, flush=True)
    args.disable_tqdm = args.disable_tqdm or not (is_main and sys.stderr.isatty())
    hide_progress_bars(always=not is_main)
    rows = load_rows(options.script, algorithm) if rows is None else rows
    trainer = _trainer(algorithm, options, rows, test_rows, mask, rewards, ref_model)
    _require_rows(trainer, rows)
    check_tokenized(trainer, rows)
    trainer.add_callback(RowsDigest(rows))
    trainer.add_callback(LogWarnings())
    _add_callbacks(algorithm, trainer, options)
    if prepare is not None:
        prepare(trainer)
    trainer.add_callback(_RunFiles(options, mask))
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(args.output_dir)
        trainer.save_state()
    except CheckpointError as error:
        raise DataError(error.text("repeat the command with --resume_from_checkpoint {}")) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(trainer)) from None
    if is_main:
        steps, seconds = trainer.state.global_step, time.monotonic() - started
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        loss = f", last loss {losses[-1]:.4f}" if losses else ""
        print(f"trained to step {steps} in {seconds:.0f} s{loss}; the model is in {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=options.script.dataset_name)
    trainer.accelerator.end_training()
    return 0


def _mask_and_rate(options: Options, config: Any) -> tuple[MaskSet | None, str]:
    """The mask, with the learning rate set for it, and the line that says what will be trained."""
    args = options.training
    line = f"{options.name}: {options.model.model_name_or_path}, "
    if options.model.use_peft:
        return None, line + f"LoRA of rank {options.model.lora_r}, learning rate {args.learning_rate:g}"
    if not options.mask.is_sparse:
        return None, line + f"all weights, learning rate {args.learning_rate:g}"
    if options.mask.mask is not None:
        mask = _mask_of_file(options.mask.mask, _without_weights(config, options))
        line += f"mask {options.mask.mask}"
    else:
        given = options.mask
        assert given.mask_density is not None
        model = _without_weights(config, options)
        try:
            mask = MaskSet.random(
                model,
                density=given.mask_density,
                pattern=given.mask_pattern,
                seed=given.mask_seed,
                pool=given.mask_pool,
            )
        except MaskError as error:
            raise ConfigError(f"--mask_density {given.mask_density}: {error}") from error
        line += f"random mask ({options.mask.mask_pattern}, seed {options.mask.mask_seed})"
    if not mask.nnz:
        raise ConfigError(f"--mask {options.mask.mask} has no active element")
    line += f" of {mask.nnz:,} elements (density {mask.density:.3g}), learning rate "
    if "learning_rate" in options.given:
        return mask, line + f"{args.learning_rate:g}"
    dense, factor = dense_rate(args), rate_factor(mask.density)
    args.learning_rate = dense * factor
    return mask, line + f"{args.learning_rate:.3g}: {dense:g}, the dense default, x {factor:.3g} (density^{EXPONENT})"


def _model_config(options: Options) -> Any:
    name = options.model.model_name_or_path
    try:
        return AutoConfig.from_pretrained(
            name, revision=options.model.model_revision, trust_remote_code=options.training.trust_remote_code
        )
    except (OSError, ValueError) as error:
        assert name is not None  # required by `parse`
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1  # not a name of the hub
        cause = "no such folder" if is_path and not Path(name).exists() else one_line(error)
        raise ConfigError(f"--model_name_or_path {name}: {cause}") from error


def _without_weights(config: Any, options: Options) -> Any:
    """The model that TRL loads, with names and shapes only."""
    architecture: Any = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is None:
            code = options.training.trust_remote_code
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=code)
        else:
            model = architecture(config)
    model.tie_weights()
    return model


def _mask_of_file(file: str, model: Any) -> MaskSet:
    if not Path(file).is_file():
        raise ConfigError(f"--mask {file}: no such file")
    mask = MaskSet.load(Path(file))
    try:
        return mask.resolve(model)
    except MaskError as error:
        remedy = "make a mask for this model ('sparse-opt mask'), or train the model of this mask"
        raise MaskError(f"--mask {file}: {error}: {remedy}") from error


def _trainer(
    algorithm: Algorithm,
    options: Options,
    rows: Any,
    test_rows: Any,
    mask: MaskSet | None,
    rewards: Sequence[Any],
    ref_model: Any,
) -> Any:
    script, args, model = options.script, options.training, options.model
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "trust_remote_code": args.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    if test_rows is None and args.eval_strategy != "no":
        test_rows = load_rows(script, algorithm, test=True)
    keywords: dict[str, Any] = {
        "model": model.model_name_or_path,
        "args": args,
        "train_dataset": rows,
        "eval_dataset": test_rows,
        "quantization_config": get_quantization_config(model),
    }
    if ref_model is not None:
        keywords["ref_model"] = ref_model
    if algorithm == "grpo":
        reward_model = script.reward_model_name_or_path
        keywords["reward_funcs"] = [*([reward_model] if reward_model else []), *rewards]
    trainer_class: Any = TRAINERS[algorithm]
    if mask is None:
        keywords["peft_config"] = get_peft_config(model)
        trainer_class = type(trainer_class.__name__, (RunTrainer, trainer_class), {})
    else:
        trainer_class = sparse_trainer(trainer_class)
        has_reference = algorithm == "dpo" or (algorithm == "grpo" and args.beta != 0.0)
        sparse = options.mask.sparse_arguments(has_reference=has_reference, fp16=args.fp16)
        keywords |= {"mask": mask, "sparse": sparse}
    try:
        if mask is not None and (quantisation := keywords.pop("quantization_config")) is not None:
            # TRL's trainers require an adapter over a model that they quantise.
            loaded = {"quantization_config": quantisation, "device_map": {"": args.device}, **args.model_init_kwargs}
            keywords["model"], args.model_init_kwargs = create_model_from_path(keywords["model"], **loaded), None
        return trainer_class(**keywords)
    except SparseOptError:
        raise
    except (OSError, ValueError, SafetensorError) as error:  # of TRL's checks, and of a model's files
        raise ConfigError(f"--model_name_or_path {model.model_name_or_path}: {one_line(error)}") from error


def _add_callbacks(algorithm: Algorithm, trainer: Any, options: Options) -> None:
    """Add the callbacks of the options; under a mask the trainer itself has the delta log."""
    mask = options.mask
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MemoryCallback())
    if not sys.stderr.isatty():
        trainer.add_callback(ProgressLines())
    if mask.log_margins:
        trainer.add_callback(MarginsCallback(trainer))
    if mask.statistics_steps is not None:
        statistics = UpdateStatisticsCallback(mask.statistics_steps, tau=mask.statistics_tau)
        trainer.callback_handler.callbacks.insert(0, statistics)  # before the trackers, which then log its statistics
    if mask.delta_log_dir is not None and not mask.is_sparse:
        trainer.add_callback(
            DeltaLogCallback(
                mask.delta_log_dir,
                mask.delta_log_steps,
                keyframe_every=mask.delta_log_keyframe_every,
                metadata={"method": algorithm},
            )
        )


def _require_rows(trainer: Any, rows: Any) -> None:
    """Raise a ConfigError if the trainer has dropped all rows, and warn if it has dropped some, as too long ones."""
    args = trainer.args
    if getattr(args, "packing", False) or not all(hasattr(found, "__len__") for found in (rows, trainer.train_dataset)):
        return
    left, given = len(trainer.train_dataset), len(rows)
    if not left:
        raise ConfigError(f"no row has a token to train within --max_length {getattr(args, 'max_length', None)}")
    if left < given and args.process_index == 0:
        warnings.warn(f"{given - left} of {given} rows are left out: nothing of them is trained", stacklevel=2)


class _RunFiles(TrainerCallback):
    """Writes the options, and a mask that was drawn, when training begins: nothing has refused the run until then.

    A new run removes what an earlier one in the folder wrote about its steps, which are not those of the options.
    """

    def __init__(self, options: Options, mask: MaskSet | None) -> None:
        self._options, self._mask = options, mask

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / OPTIONS_FILE, self._options.to_yaml())
        if self._mask is not None and self._options.mask.mask is None:
            self._mask.save(folder / MASK_FILE)
        if state.global_step == 0:
            RowFile(folder / STATISTICS_FILE).cut(0)
            remove_after(folder / MARGINS_FOLDER, 0)


def _checkpoint(args: Any) -> str | bool | None:
    """The folder of `--resume_from_checkpoint`; True for the newest one in the output folder."""
    given = args.resume_from_checkpoint
    if given is None or str(given).lower() in FALSE:
        return None
    if str(given).lower() in TRUE:
        folder = args.output_dir
        given = get_last_checkpoint(folder) if Path(folder).is_dir() else None
        if given is None:
            raise ConfigError(f"--resume_from_checkpoint true: {folder} has no checkpoint")
        return True
    if not Path(given, "trainer_state.json").is_file():
        raise ConfigError(f"--resume_from_checkpoint {given}: expected a checkpoint's folder, or true")
    return str(given)


def _interrupted(trainer: Any) -> str:
    args, step = trainer.args, trainer.state.global_step
    line = f"interrupted after step {step} of {trainer.state.max_steps}"
    last = last_checkpoint(args.output_dir)
    if last is None:
        return f"{line}; no checkpoint was saved: a lower --save_steps than {args.save_steps:g} saves the first earlier"
    return f"{line}; {last} is kept: repeat the command with --resume_from_checkpoint {last}"
