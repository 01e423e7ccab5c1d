"""Strict loading of models, tokenizers and configurations in Hugging Face format.

transformers initializes tensors missing from the files at random and ignores unknown ones, with a warning. Here both
are errors.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from sparse_opt.errors import DataError
from sparse_opt.files import one_line


@contextmanager
def reading(what: str) -> Iterator[None]:
    """A context that turns an error about the content of a model's files into a DataError, `cannot load {what}: ...`.

    transformers hardly validates files, so that an invalid file can raise nearly any type of error. The message names
    the type, and the original error is its cause.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it also logs many lines about the errors in the files
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise DataError(f"cannot load {what}: {one_line(error)}") from error
    except (
        TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, EOFError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        # Messages such as KeyError's "'metadata'" mean nothing without the type.
        raise DataError(f"cannot load {what}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def load_pretrained(model_class: Any, source: str | Path, what: str, *, dtype: torch.dtype) -> Any:
    """A model by hub name or local folder, on the CPU, with exactly the tensors that its files hold.

    Args:
        model_class: an Auto class of transformers, or a model's own class.
        what: the kind of model, for messages: `a causal language model`.
        dtype: dtype of the loaded weights.

    Raises:
        DataError: the model or folder does not exist; the folder has no config.json; a file cannot be read; a tensor is
            missing from the files, unknown to the model, or differs in shape.
    """
    folder = Path(source)
    # Without a config.json, a model's own class would use its default configuration.
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise DataError(f"cannot load {what} from {source}: the folder has no config.json")
    with reading(f"{what} from {source}"):
        model, info = model_class.from_pretrained(
            source,
            dtype=dtype,
            output_loading_info=True,
            # Mismatched tensors are refused by name below; transformers' own error does not name the tensor.
            ignore_mismatched_sizes=True,
        )
    missing, unexpected, mismatched = (
        sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    if missing:
        raise DataError(f"{source}: no weights for {len(missing)} tensors of {what}, among them {missing[0]}")
    if mismatched:
        name, found, expected = mismatched[0]
        raise DataError(
            f"{source}: {name} is {list(found)} in its files, {list(expected)} in {what} of its config.json"
            + (f"; and {len(mismatched) - 1} more" if len(mismatched) > 1 else "")
        )
    if unexpected:
        raise DataError(
            f"{source}: has {len(unexpected)} tensors that {what} of its config.json lacks, among them {unexpected[0]}"
        )
    if info["error_msgs"]:
        raise DataError(f"cannot load {what} from {source}: {' '.join(str(info['error_msgs'][0]).split())}")
    return model


def load_causal_lm(source: str | Path, dtype: torch.dtype) -> Any:
    """A causal language model by hub name or local folder, on the CPU, in `dtype`. Raises as `load_pretrained` does."""
    from transformers import AutoModelForCausalLM

    return load_pretrained(AutoModelForCausalLM, source, "a causal language model", dtype=dtype)


def max_positions(config: Any) -> int | None:
    """The number of positions of a model with this configuration; None if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def load_tokenizer_from(source: str | Path) -> Any:
    """The tokenizer of a model by hub name or local folder.

    Raises:
        DataError: there is none, or its files cannot be read.
    """
    from transformers import AutoTokenizer

    with reading(f"a tokenizer from {source}"):
        return AutoTokenizer.from_pretrained(source)


def load_config_from(source: str | Path) -> Any:
    """The configuration of a model by hub name or local folder.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from transformers import AutoConfig

    with reading(f"the configuration of {source}"):
        return AutoConfig.from_pretrained(source)
