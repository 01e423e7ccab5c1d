"""`Engine`: a process that holds a copy of the model, as an inference engine does, and receives weights over a pipe."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load, save
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...errors import SparseOptError
from ...weight_sync import WeightReceiver

ROWS_PER_PASS = 50


class Engine:
    """Starts the process, which loads a checkpoint; on exit ends it."""

    def __init__(self, checkpoint: Path, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, checkpoint, device), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.close()  # which ends the process after its last call
        self._process.join(timeout=10)
        self._process.terminate()
        self._process.join()

    def call(self, method: str, argument: Any) -> Any:
        """`set_weights` replaces all weights; `receive` applies a weight update; `margins` answers rows.

        Returns when the process has done it.

        Raises:
            SparseOptError: the process has failed.
        """
        try:
            self._pipe.send((method, argument))
            return self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise SparseOptError(f"the engine's process failed in '{method}'; its error is above") from error


def _serve(pipe: Any, checkpoint: Path, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process, too; the other one ends it
    model, tokenizer = load_checkpoint(checkpoint, device)
    receiver = WeightReceiver(model)
    while True:
        try:
            method, argument = pipe.recv()
        except EOFError:
            return
        result = None
        if method == "receive":
            receiver.receive(argument)
        elif method == "set_weights":
            weights = load(argument)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
        else:
            result = margins(model, tokenizer, argument)
        if device == "cuda":
            torch.cuda.synchronize()
        pipe.send(result)


def load_checkpoint(checkpoint: Path, device: str = "cpu") -> tuple[Any, Any]:
    """The model, in fp32, and the tokenizer of a folder."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(checkpoint)


def all_weights(model: nn.Module) -> bytes:
    """The argument of `set_weights`: all parameters, tied ones once."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in model.named_parameters()})


@torch.no_grad()
def margins(model: Any, tokenizer: Any, rows: Sequence[dict[str, str]]) -> list[float]:
    """The log-probability of each row's chosen answer minus that of its rejected one."""
    found: list[float] = []
    for first in range(0, len(rows), ROWS_PER_PASS):
        some = rows[first : first + ROWS_PER_PASS]
        texts = [row["prompt"] + row[answer] for answer in ("chosen", "rejected") for row in some]
        starts = [len(tokenizer(row["prompt"])["input_ids"]) for row in some] * 2
        ids = [torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64, device="cpu") for text in texts]
        inputs = pad_sequence(ids, batch_first=True).to(model.device)  # on the right: no token attends to padding
        logprobs = model(input_ids=inputs).logits[:, :-1].log_softmax(-1).gather(-1, inputs[:, 1:, None])[..., 0]
        of = [float(row[start - 1 : len(i) - 1].sum()) for row, start, i in zip(logprobs, starts, ids, strict=True)]
        found += [chosen - rejected for chosen, rejected in zip(of[: len(some)], of[len(some) :], strict=True)]
    return found
