"""Thousands of broken files of a log: each is read as the right bits, or refused with an error naming file and step.

    python mutation_driver.py FOLDER COUNT SEED

Every read is under a limit on the process's memory, little above what it had before. Prints the counts as JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out

import torch
from conftest import States, assert_same_bits
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.delta import files as delta_files
from sparse_opt.errors import DeltaLogError
from sparse_opt.tensors import metadata_digest

MEMORY = 96 << 20  # bytes above what the process has mapped; logs and states are below one MiB
SECONDS = 2.0
HOSTILE = (0, 1, -1, 7, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**30)


@dataclass
class Log:
    directory: Path
    states: dict[int, dict[str, torch.Tensor]]
    contents: dict[str, bytes]

    def __post_init__(self) -> None:
        self.versions = {name: self.version(self.directory / name) for name in self.contents}

    @staticmethod
    def version(path: Path) -> tuple[int, ...]:
        found = path.stat()
        return found.st_ino, found.st_size, found.st_mtime_ns

    def restore(self) -> None:
        for path in self.directory.iterdir():
            if path.name not in self.contents:
                path.unlink()
        for name, content in self.contents.items():
            path = self.directory / name
            if not path.exists() or self.version(path) != self.versions[name]:
                path.write_bytes(content)
                self.versions[name] = self.version(path)

    def behind(self, step: int) -> int:
        """The last step that is rebuilt by way of a step's file."""
        if DeltaLog.open(self.directory).settings.against == "base":
            return step
        return 3 if step < 5 else 8


def make_log(directory: Path, seed: int, level: str, against: str, masked: bool) -> Log:
    source = States(seed)
    state = {
        "a": source.bits((30, 50), torch.bfloat16),
        "b": source.bits((9000,), torch.bfloat16),
        "c": source.bits((40,), torch.float32),
        "n": torch.tensor(3),
    }
    mask = MaskSet.from_bool(
        {name: torch.arange(state[name].numel()) % 9 < 3 for name in ("b", "c")}
        | {"a": torch.rand((30, 50), generator=torch.Generator().manual_seed(seed)) < 0.2}
    )
    options: dict[str, Any] = {"level": level, "against": against, "mask": mask if masked else None}
    states = {0: {name: tensor.clone() for name, tensor in state.items()}}
    with DeltaLog.create(directory, state, keyframe_every=4, **options) as log:
        for step in (1, 2, 3, 5, 6, 8):
            for name, positions in mask.indices.items():
                words = state[name].view(-1).view(torch.int16 if name != "c" else torch.int32)
                words[positions[source.source.randrange(7) :: 7].long()] += 1
            if step == 3:
                state["n"] += 1
            log.append(step)
            states[step] = {name: tensor.clone() for name, tensor in state.items()}
    contents = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert sum("patch" in name for name in contents) == 5, sorted(contents)
    return Log(directory, states, contents)


class Mutations:
    """Each breaks one or two files of a log."""

    def __init__(self, source: random.Random, logs: list[Log]) -> None:
        self.source, self.logs, self.broken = source, logs, ""
        self.all: list[Callable[[Log], None]] = [
            self.flip, self.flip, self.flip_header, self.cut, self.extend, self.overwrite, self.swap, self.copy_over,
            self.rename, self.foreign, self.length_bomb, self.header_bomb, self.tensors, self.forged_payload,
            self.forged_payload, self.forged_metadata, self.break_mask,
        ]  # fmt: skip

    def file(self, log: Log, kind: str = "") -> Path:
        names = [name for name in log.contents if name.startswith("step_") and kind in name]
        self.broken = self.source.choice(sorted(names))
        return log.directory / self.broken

    def flip(self, log: Log) -> None:
        path = self.file(log)
        content = bytearray(path.read_bytes())
        for _ in range(self.source.choice((1, 1, 2, 9))):
            content[self.source.randrange(len(content))] ^= 1 << self.source.randrange(8)
        path.write_bytes(content)

    def flip_header(self, log: Log) -> None:
        path = self.file(log)
        content = bytearray(path.read_bytes())
        content[self.source.randrange(8 + int.from_bytes(content[:8], "little"))] = self.source.randrange(256)
        path.write_bytes(content)

    def cut(self, log: Log) -> None:
        path = self.file(log)
        os.truncate(path, self.source.randrange(path.stat().st_size))

    def extend(self, log: Log) -> None:
        with self.file(log).open("ab") as file:
            file.write(self.source.randbytes(self.source.choice((1, 8, 500))))

    def overwrite(self, log: Log) -> None:
        path = self.file(log)
        content = bytearray(path.read_bytes())
        at = self.source.randrange(len(content))
        many = min(len(content) - at, self.source.choice((1, 8, 64, 512)))
        content[at : at + many] = bytes(many) if self.source.random() < 0.5 else self.source.randbytes(many)
        path.write_bytes(content)

    def swap(self, log: Log) -> None:
        a, b = self.file(log), self.file(log)
        one, other = a.read_bytes(), b.read_bytes()
        a.write_bytes(other)
        b.write_bytes(one)

    def copy_over(self, log: Log) -> None:
        self.file(log).write_bytes(self.file(log).read_bytes())

    def rename(self, log: Log) -> None:
        path = self.file(log)
        step, kind = self.source.choice((4, 7, 9, *log.states)), self.source.choice(("patch", "keyframe"))
        path.rename(path.with_name(f"step_{step:08d}.{kind}.safetensors"))

    def foreign(self, log: Log) -> None:
        path, other = self.file(log), self.source.choice(self.logs)
        if path.name in other.contents:
            path.write_bytes(other.contents[path.name])
        else:
            path.unlink()

    def length_bomb(self, log: Log) -> None:
        path = self.file(log)
        length = self.source.choice([n for n in HOSTILE if 0 <= n < 2**64] + [path.stat().st_size, 10**8])
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])

    def header_bomb(self, log: Log) -> None:
        """Other dtypes, shapes and offsets in the header, or one that is deep or has many entries."""
        path = self.file(log)
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        what = self.source.randrange(4)
        if what < 2:
            entry = header[self.source.choice([key for key in header if key != "__metadata__"])]
            key = self.source.choice(("shape", "data_offsets"))
            if entry[key]:
                entry[key][self.source.randrange(len(entry[key]))] = self.source.choice(HOSTILE)
            else:
                entry["dtype"] = self.source.choice(("F64", "BOOL", "F4", "X", "I8"))
            text = json.dumps(header)
        elif what == 2:
            text = '{"a":' * 20_000 + "0" + "}" * 20_000
        else:
            many = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(2000)}
            text = json.dumps(header | many)
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + content[end:])

    def tensors(self, log: Log) -> None:
        """Tensors gone, added or of another size, under the header that was there."""
        path = self.file(log)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        found = load_file(path)
        name = self.source.choice(sorted(found))
        change = self.source.randrange(3)
        if change == 0:
            del found[name]
        elif change == 1:
            found[name] = found[name].reshape(-1)[: found[name].numel() // 2].clone()
        else:
            found[f"{name}.more"] = found[name].clone()
        save_file(found, path, metadata)

    def forged_payload(self, log: Log) -> None:
        """A payload with all digests of the file right, so that the decoder sees it."""
        path = self.file(log, "patch")
        step = int(path.name[5:13])
        header = delta_files.read_header(delta_files.step_file(log.directory, step, "patch"))
        payload = {name: tensor.clone() for name, tensor in load_file(path).items()}
        for _ in range(self.source.choice((1, 1, 3))):
            part = payload[self.source.choice(sorted(name for name in payload if payload[name].numel()))]
            data = part.view(-1).view(torch.uint8)
            at = self.source.randrange(len(data))
            data[at : at + self.source.choice((1, 4, 64))] = self.source.choice((0, 1, 127, 255))
        delta_files.write_step(replace(header, payload_digest=""), payload, replace=True)

    def forged_metadata(self, log: Log) -> None:
        """Other metadata with the header digest right."""
        path = self.file(log)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        del metadata["header_digest"]
        key = self.source.choice(sorted(metadata))
        old = metadata[key]
        values = [
            "",
            "-1",
            "1",
            "tight",
            "packed",
            "mask",
            "base",
            old[:-1],
            old * 2,
            "9" * 5000,
            "[" * 9000,
            '{"a":1}',
        ]
        if key == "layout":
            layout = json.loads(old)
            spec = self.source.choice(layout["tensors"])
            spec[2] = [self.source.choice(HOSTILE)] * self.source.choice((1, 2, 5000))
            values += [json.dumps(layout)] * len(values)
        metadata[key] = self.source.choice(values)
        save_file(load_file(path), path, {**metadata, "header_digest": metadata_digest(metadata)})

    def break_mask(self, log: Log) -> None:
        path, self.broken = log.directory / "mask.safetensors", "step_00000001"
        if not path.exists():
            self.flip(log)
        elif self.source.random() < 0.3:
            others = [other.contents[path.name] for other in self.logs if path.name in other.contents]
            path.write_bytes(self.source.choice(others))
        else:
            content = bytearray(path.read_bytes())
            content[self.source.randrange(len(content))] ^= 1 << self.source.randrange(8)
            path.write_bytes(content)


def read(log: Log, step: int, name: str | None) -> bool:
    """Whether the read was refused; AssertionError if it was neither right nor refused with a proper message."""
    try:
        opened = DeltaLog.open(log.directory)
        if name is None:
            assert_same_bits(opened.load(step), log.states[step])
        else:
            ((_, tensor),) = opened.tensor_states(name, [step])
            assert_same_bits({name: tensor}, {name: log.states[step][name]})
    except DeltaLogError as error:
        text = str(error)
    else:
        return False
    named = str(log.directory) in text and re.search(r"step \d", text)
    assert named and "\n" not in text and len(text) < 20_000, text
    return True


def mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(root: Path, count: int, seed: int) -> None:
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # of the files forged here: all of them must be refused
    logs = [
        make_log(root / str(i), i, level, against, masked)
        for i, (level, against, masked) in enumerate(
            [
                ("packed", "previous", False),
                ("packed", "base", True),
                ("packed", "previous", True),
                ("tight", "previous", False),
            ]
        )
    ]
    source = random.Random(seed)
    mutations = Mutations(source, logs)
    last = {(log.directory, step): log.behind(step) for log in logs for step in log.states}
    for log in logs:
        for step in log.states:
            assert not read(log, step, None) and not read(log, step, "b")
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + MEMORY, resource.RLIM_INFINITY))
    outcomes: dict[str, Counter[str]] = {}
    slowest = 0.0
    for i in range(count):
        log = source.choice(logs)
        mutation = source.choice(mutations.all)
        mutation(log)
        # Mostly a read that uses the broken file.
        step, name = source.choice(sorted(log.states)), source.choice((None, None, "a", "b", "c", "n"))
        if source.random() < 0.8:
            step = last[log.directory, int(mutations.broken[5:13])]
        began = time.perf_counter()
        try:
            refused = read(log, step, name)
        except BaseException:
            print(f"mutation {i}, {mutation.__name__} of log {log.directory}, step {step}, {name}", file=sys.stderr)
            shutil.copytree(log.directory, root / "kept")
            raise
        slowest = max(slowest, time.perf_counter() - began)
        outcomes.setdefault(mutation.__name__, Counter())["refused" if refused else "right"] += 1
        log.restore()
    assert slowest < SECONDS, f"a read took {slowest:.1f} s"
    print(json.dumps({"slowest": slowest, "outcomes": outcomes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
