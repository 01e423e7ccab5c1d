"""The rows of a TRL run: load them, refuse those that TRL would not train as written, recognize them on resuming.

`datasets` and TRL read, render and tokenize. This file refuses what they would change without an error; "Data" in
docs/integrations.md lists it. The first row of a dataset is row 1 in messages.
"""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa
import xxhash
from datasets import Dataset, DatasetDict, Features, IterableDataset, Json, ReadInstruction, Value
from transformers import TrainerCallback

from ...errors import ConfigError, DataError, listed
from ...files import is_text, one_line
from .records import as_trl_rows, shortened

Algorithm = Literal["sft", "dpo", "grpo"]

N_DIGESTED = 1000  # rows of a stream that are in its digest
_READERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected", "text")  # what TRL trains, if it is not messages
CONVERSATIONS = ("messages", "conversations")
_COMPLETIONS = {"sft": ("completion",), "dpo": ("chosen", "rejected"), "grpo": ()}


FromArray = Callable[[list[Any]], dict[str, Any]]


def load_rows(
    script_arguments: Any, algorithm: Algorithm, *, test: bool = False, from_array: FromArray | None = None
) -> Dataset | IterableDataset:
    """Load the rows that TRL's ScriptArguments name, and check each for the algorithm; arguments of `read_rows`.

    Raises:
        ConfigError, DataError: as `read_rows`; or TRL would not train a row as written.
    """
    name, rows = script_arguments.dataset_name, read_rows(script_arguments, test=test, from_array=from_array)
    return _checked(as_trl_rows(rows, name, algorithm), name, algorithm)


def read_rows(
    script_arguments: Any, *, test: bool = False, from_array: FromArray | None = None
) -> Dataset | IterableDataset:
    """The rows that TRL's ScriptArguments name, with the columns that they have.

    `dataset_name` is a .json, .jsonl, .csv or .parquet file, a folder of such files, a folder written by
    `save_to_disk`, or a dataset's name on the hub. `dataset_train_split` may have slices, as "train[:10%]+train[90%:]";
    with `test` the rows are those of `dataset_test_split`.

    Args:
        from_array: makes a row of one that is an array in a JSON file; None refuses such rows, as a ValueError does.

    Raises:
        ConfigError: no such file or folder, or no such split of it.
        DataError: a file or dataset cannot be read or has no rows.
    """
    name, option = script_arguments.dataset_name, "dataset_test_split" if test else "dataset_train_split"
    split, path = getattr(script_arguments, option), require_dataset(name)
    if not path.exists():
        rows = _load(
            name, name=script_arguments.dataset_config, split=split, streaming=script_arguments.dataset_streaming
        )
    elif script_arguments.dataset_streaming:
        raise ConfigError(f"--dataset_streaming is for datasets of the hub; {name} is local: leave the option out")
    else:
        rows = _local_rows(path, script_arguments.dataset_config, split, option, from_array)
    if isinstance(rows, Dataset) and len(rows) == 0:
        raise DataError(f"{name} has no rows" + ("" if split == "train" else f" in split {split}"))
    return rows


class MissingDataset(ConfigError):
    """A dataset's file or folder does not exist."""


def require_dataset(name: str | None) -> Path:
    """The path of a dataset. Raises ConfigError without a name, and MissingDataset for a file that does not exist."""
    if not name:
        raise ConfigError("--dataset_name is missing: give a file, a folder or a dataset of the hub")
    path = Path(name).expanduser()
    if not path.exists() and (path.suffix in _READERS or path.is_absolute() or name.startswith(("~", "."))):
        raise MissingDataset(f"dataset {name}: no such file or folder")
    return path


def _load(source: str, /, **options: Any) -> Any:
    """`datasets.load_dataset` with errors of one line."""
    try:
        return datasets.load_dataset(source, **options)
    except (OSError, ValueError, RuntimeError, TypeError, LookupError, datasets.exceptions.DatasetsError) as error:
        where = options.get("data_files", source)
        raise DataError(f"dataset {where} cannot be read: {one_line(error.__cause__ or error)}") from error


def _local_rows(path: Path, config: str | None, split: str, option: str, from_array: Any) -> Dataset:
    """The rows of a local file or folder in `split`, which has the syntax of `datasets`."""
    saved: Any = {}
    if path.is_file():
        files = {"train": [path]}
    elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        saved = datasets.load_from_disk(str(path))
        saved = saved if isinstance(saved, DatasetDict) else {"train": saved}
        files = {name: [] for name in saved}
    else:
        try:
            found = datasets.load_dataset_builder(str(path), name=config).config.data_files
        except (ValueError, OSError) as error:  # no data files, or no such configuration
            raise ConfigError(f"--dataset_name {path}: {one_line(error)}") from error
        files = {str(name): [Path(file) for file in names] for name, names in found.items()}
    requested = [part.partition("[")[0].strip() for part in split.split("+")]
    if missing := [name for name in requested if name not in files]:
        raise ConfigError(f"--{option} {split}: {path} has no split {missing[0]!r}, only {', '.join(files)}")
    splits = {name: saved[name] if saved else _read(files[name], from_array) for name in dict.fromkeys(requested)}
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"--{option} {split}: {one_line(error)}") from error
    return datasets.concatenate_datasets(
        [splits[part.splitname].select(range(part.from_, max(part.from_, part.to))) for part in parts]
    )


def _read(files: Sequence[Path], from_array: Any) -> Dataset:
    """The rows of files of one type. No reader infers a type from text."""
    for file in files:
        if file.suffix not in _READERS:
            raise ConfigError(f"{file}: unknown file type {file.suffix!r}, expected {', '.join(_READERS)}")
        with file.open("rb") as lines:
            if not any(line.strip() for line in lines):
                raise DataError(f"{file} has no rows")
    names, kind = [str(file) for file in files], _READERS[files[0].suffix]
    if kind == "json":
        return _dataset([row for file in files for row in _json_rows(file, from_array)], listed(names))
    if kind == "parquet":
        return _load("parquet", data_files=names, split="train")
    try:
        with files[0].open(encoding="utf-8-sig", newline="") as lines:
            header = next(csv.reader(lines))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{files[0]} cannot be read: {one_line(error)}") from error
    text = Features({column: Value("string") for column in header})
    return _load("csv", data_files=names, split="train", features=text, keep_default_na=False)


def _json_rows(file: Path, from_array: Any) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, or of a JSON array.

    Arrow's parser would make datetimes of dates and floats of large integers.
    """
    where = f"{file}"
    try:
        text = file.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = []
            for number, line in enumerate(text.split("\n"), 1):
                where = f"{file}, line {number}"
                if line.strip():
                    rows.append(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: {one_line(error)}; expected one JSON object a line, or an array of objects"
        ) from error
    for number, row in enumerate(rows, 1):
        if isinstance(row, list) and from_array is not None:
            try:
                row = from_array(row)
            except ValueError as error:
                raise DataError(f"{file}, row {number}: found {shortened(row)}, {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number}: found {shortened(row)}, expected a JSON object")
        yield row


def _dataset(rows: list[dict[str, Any]], files: str) -> Dataset:
    """The rows as a Dataset in which each value is the file's.

    A column whose scalars are not of one type, such as 7 and 2.5, is text. So are numbers in a column that TRL trains.
    """
    columns, features = {}, {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        types = {type(value) for value in values if value is not None}
        if types & {list, dict}:
            features[name] = _nested_feature(values, f"{files}, column {name!r}")
        elif len(types) == 1 and (types == {str} or name not in TEXT_COLUMNS) and _fits_arrow(values):
            features[name] = Value({bool: "bool", int: "int64", float: "float64", str: "string"}[types.pop()])
        else:
            values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
            features[name] = Value("string")
        for number, value in enumerate(values, 1):
            if isinstance(value, str) and not is_text(value):
                raise DataError(f"{files}, column {name!r}: row {number} has a lone surrogate, expected Unicode text")
        columns[name] = values
    return Dataset.from_dict(columns, features=Features(features))


def _fits_arrow(values: list[Any]) -> bool:
    return all(not isinstance(value, int) or -(2**63) <= value < 2**63 for value in values)


def _nested_feature(values: list[Any], where: str) -> Any:
    """The Arrow type of lists or objects if it keeps them, else `Json`.

    Arrow gives all objects of a column the same keys, with null for what a row does not have, and all numbers one type.
    """
    exact = [json.dumps(value) for value in values]
    try:
        array = pa.array(values)
        if [json.dumps(value) for value in array.to_pylist()] == exact:
            return Features.from_arrow_schema(pa.schema([("", array.type)]))[""]
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):
        pass  # values of several types
    feature = Json()
    for number, (value, text) in enumerate(zip(values, exact, strict=True), 1):
        try:
            kept = value is None or json.dumps(feature.decode_example(feature.encode_example(value))) == text
        except (ValueError, OverflowError):  # integers beyond 64 bits, lone surrogates
            kept = False
        if not kept:
            raise DataError(
                f"{where}: `datasets` would change {shortened(value)} in row {number}: write numbers of more than 10 "
                "digits inside of lists and objects as strings"
            )
    return feature


def _checked(rows: Any, name: str, algorithm: Algorithm) -> Any:
    """The rows, as messages that TRL renders once. Raises DataError for columns and rows that it would not train."""
    columns = list(rows.features or next(iter(rows)))
    needed = () if algorithm == "sft" and "prompt" not in columns else _COMPLETIONS[algorithm] or ("prompt",)
    if missing := [column for column in needed if column not in columns]:
        raise DataError(f"{name}: {algorithm} needs the column {missing[0]!r}, found {', '.join(columns)}")
    if ignored := {"tools", "chat_template_kwargs"}.intersection(columns if algorithm == "grpo" else ()):
        raise DataError(f"{name}: TRL's GRPOTrainer does not render the column {min(ignored)!r}: remove or rename it")
    where: dict[str, Any] = {"name": name, "algorithm": algorithm}
    if not isinstance(rows, Dataset):
        return rows.map(_corrections, with_indices=True, fn_kwargs=where)
    corrected, equal, empty = False, [], []
    for index, row in enumerate(rows.select_columns([c for c in (*TEXT_COLUMNS, *CONVERSATIONS) if c in columns])):
        corrected = bool(_corrections(row, index, **where)) or corrected
        if algorithm == "dpo" and row["chosen"] == row["rejected"]:
            equal.append(index + 1)
        texts = [row[column] for column in _COMPLETIONS[algorithm] if column in row]
        if any(isinstance(text, str) and not text.strip() for text in texts):
            empty.append(index + 1)
    if equal:
        text = f"{name}: chosen equals rejected in {len(equal)} of {len(rows)} rows, the first is row {equal[0]}"
        if len(equal) == len(rows):
            raise DataError(f"{text}: DPO learns nothing from them")
        warnings.warn(f"{text}; DPO learns nothing from these rows", stacklevel=3)
    if empty:
        text = f"{name}: a completion is empty in {len(empty)} of {len(rows)} rows, the first is row {empty[0]}"
        warnings.warn(f"{text}; at most the end of the text is trained there", stacklevel=3)
    if corrected:
        rows = rows.map(_corrections, with_indices=True, fn_kwargs=where, load_from_cache_file=False)
    return rows


def _corrections(row: Mapping[str, Any], index: int, name: str, algorithm: Algorithm) -> dict[str, Any]:
    """The columns of a row that TRL must get in another form. Raises DataError if there is no right form."""
    where = f"{name}, row {index + 1}"
    given = {
        column: _messages(row[column], f"{where}, column {column!r}")
        for column in ("prompt", *_COMPLETIONS[algorithm], *(("messages",) if algorithm == "sft" else ()))
        if column in row
    }
    prompt, completions = given.get("prompt"), {c: given[c] for c in _COMPLETIONS[algorithm] if c in given}
    if (
        isinstance(prompt, str)
        and completions
        and all(isinstance(value, list) and value[0].get("content") == prompt for value in completions.values())
    ):
        prompt = next(iter(completions.values()))[:1]  # the conversations begin with the prompt
    changes: dict[str, Any] = {}
    for column, value in completions.items():
        if prompt is None:  # TRL takes the messages that both begin with
            if isinstance(value, list) and value[0] != given["chosen"][0]:
                raise DataError(f"{where}: chosen and rejected begin with different messages: add a column 'prompt'")
            continue
        if isinstance(value, str) != isinstance(prompt, str):
            raise DataError(f"{where}: of 'prompt' and {column!r}, one is text and one is messages: write both alike")
        if isinstance(value, str):
            continue
        if value[: len(prompt)] == prompt:  # TRL would render the prompt twice, and train it
            changes |= {"prompt": prompt, column: value[len(prompt) :]}
        answer = changes.get(column, value)
        if not answer:
            raise DataError(f"{where}: {column!r} is the prompt alone, expected an answer of the assistant")
        if (role := answer[0]["role"]) in ("user", "system"):
            raise DataError(
                f"{where}: {column!r} begins with the {role}'s message, which would be trained: move it to 'prompt'"
            )
    return changes


def _messages(value: Any, where: str) -> Any:
    """Text, or messages without the null fields that Arrow adds."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {shortened(value)}, expected text or a list of messages")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: message {number} is {shortened(message)}, expected an object with 'role' and 'content'"
            )
    return [{key: field for key, field in message.items() if field is not None} for message in value]


# On resuming


def rows_digest(rows: Dataset | IterableDataset) -> str:
    """A digest of the rows and their order; of a stream, of its first 1,000 rows."""
    digest = xxhash.xxh3_128()
    if not isinstance(rows, Dataset):
        rows = rows.take(N_DIGESTED)
    for table in rows.with_format("arrow").iter(batch_size=1000):
        for row in table.to_pylist():
            digest.update(json.dumps(row, default=str).encode() + b"\n")
    return digest.hexdigest()


class RowsDigest(TrainerCallback):
    """Stores the digest of the rows in each checkpoint's `trainer_state.json`.

    Resuming from a checkpoint of other rows raises a DataError before the first step.
    """

    def __init__(self, rows: Dataset | IterableDataset) -> None:
        self.digest = rows_digest(rows)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get("rows_digest")
        if state.global_step and saved is None:
            warnings.warn("the checkpoint has no digest of its rows, which are not compared", stacklevel=2)
        elif saved is not None and saved != self.digest:
            raise DataError(
                f"the rows of the dataset are not those of the checkpoint of step {state.global_step} "
                f"(digest {self.digest}, expected {saved}): restore them, or start a new run"
            )
        state.stateful_callbacks["rows_digest"] = self.digest
