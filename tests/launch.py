"""Runs a function of a test, or a command, in several processes of one process group, gloo or NCCL.

The processes are forked from a server that has imported torch and transformers and has run nothing: in a new process,
importing them takes several seconds.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

_SERVER = multiprocessing.get_context("forkserver")
_PRELOADED = [
    "pytest",
    "datasets",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "sparse_opt.trainers.sft",
]
_SERVER.set_forkserver_preload(_PRELOADED)


def preload(*modules: str) -> None:
    """Let the server import these modules too, if it has not started: of a test's file, when it is collected."""
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)
    _SERVER.set_forkserver_preload(_PRELOADED)


def backends(n_gpus: int) -> pytest.MarkDecorator:
    """The parameter `backend` of tests that run with gloo, and on so many GPUs with NCCL."""
    few = pytest.mark.skipif(torch.cuda.device_count() < n_gpus, reason=f"needs {n_gpus} CUDA GPUs")
    return pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, few])])


BACKENDS = backends(2)


def ranks(n: int, *, nccl: bool = True, **limits: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function that `n` ranks run, with gloo and, unless `nccl` is False, with NCCL on `n` GPUs.

    The function takes its rank, and then the fixtures and parameters of the test; see `launch`, also for `limits`.
    """

    def make(function: Callable[..., None]) -> Callable[..., None]:
        rank, *given = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(backend: str, **values: Any) -> None:
            launch(function, n, *(values[parameter.name] for parameter in given), backend=backend, **limits)

        test.__signature__ = inspect.Signature([rank.replace(name="backend"), *given])
        return backends(n)(test) if nccl else pytest.mark.parametrize("backend", ["gloo"])(test)

    return make


def device() -> torch.device:
    """The device of this rank; the CPU without a process group."""
    on_gpu = torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.distributed.get_rank()) if on_gpu else torch.device("cpu")


def launch(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 120.0,
    collective_timeout: float = 60.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(rank, *args)` in `n` processes, and return the results by rank.

    The processes have RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in their environment, an initialized process
    group of `backend`, and one thread each. With "nccl", process r uses GPU r.

    Args:
        function: defined at the top level of the test's file, which every process loads again.
        args: what `torch.save` can write.
        timeout: seconds for all processes together.
        collective_timeout: the timeout of the process group, in seconds.

    Raises:
        AssertionError: a process failed, or all did not end in time; has the output of all, and the stacks of
            processes that had not ended.
    """
    with tempfile.TemporaryDirectory(prefix="launch") as folder:
        torch.save(args, Path(folder) / "args")
        source = (function.__code__.co_filename, function.__name__)
        processes = []
        for rank in range(n):
            variables = {**os.environ, **_variables(rank, n)}
            arguments = (folder, *source, backend, collective_timeout, variables)
            processes.append(_SERVER.Process(target=_run, args=arguments, daemon=True))
            processes[-1].start()
        try:
            failure = _wait(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failure is not None:
            outputs = {r: (Path(folder) / f"output{r}").read_text(errors="replace") for r in range(n)}
            raise AssertionError("\n".join([failure[1], *(f"--- rank {r}\n{text}" for r, text in outputs.items())]))
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(n)]


@dataclass(frozen=True)
class Ended:
    """A command that has ended: the exit code of the rank that failed first, or 0, and what all ranks have printed."""

    returncode: int
    stdout: str
    stderr: str


def run_command(
    n: int,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    script: Path | None = None,
    module: str | None = None,
    launched: bool = False,
    cwd: Path | None = None,
    killed: tuple[int, Callable[[], bool]] | None = None,
    timeout: float = 120.0,
) -> Ended:
    """Run `sparse-opt` with these words in `n` processes, as torchrun does: if a rank fails, the others are terminated.

    Args:
        script: run instead of `sparse-opt`.
        module: the same, as of `python -m`.
        launched: whether one process has the variables of torchrun, too.
        killed: (rank, when): this rank is killed as soon as `when()` is true.

    Raises:
        AssertionError: not all processes ended in time; has what they have printed.
    """
    with tempfile.TemporaryDirectory(prefix="launch") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        processes = []
        for rank in range(n):
            variables = {**shared, **(_variables(rank, n) if launched or n > 1 else {}), "OMP_NUM_THREADS": "1"}
            arguments = (folder, rank, script, module, list(words), variables, cwd or Path.cwd())
            processes.append(_SERVER.Process(target=_run_command, args=arguments, daemon=True))
            processes[-1].start()
        failed, deadline = 0, time.monotonic() + timeout
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            if killed is not None and killed[1]():
                processes[killed[0]].kill()
                killed = None
            if not failed and (failed := next((code for process in processes if (code := process.exitcode)), 0)):
                for process in processes:
                    process.terminate()
            time.sleep(0.02)
        in_time = all(process.exitcode is not None for process in processes)
        for process in processes:
            process.kill()
            process.join()
        failed = failed or next((code for process in processes if (code := process.exitcode)), 0)
        stdout, stderr = (
            "".join((Path(folder) / f"{name}{rank}").read_text(errors="replace") for rank in range(n))
            for name in ("stdout", "stderr")
        )
        assert in_time, f"not all ranks ended in {timeout} seconds\n{stdout}{stderr}"
        return Ended(failed, stdout, stderr)


def run_script(
    script: Path, words: Sequence[str], environment: Mapping[str, str] = os.environ, **options: Any
) -> Ended:
    """`python script words` in one process; see `run_command`."""
    return run_command(1, words, environment, script=script, **options)


def run_module(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `python -m MODULE WORD ...`, or the processes of `python -m torch.distributed.run ... -m MODULE WORD ...`.

    Prints their output on stderr, and returns the exit code. torchrun itself does not run, only its parser of options.
    """
    assert list(command[:2]) == [sys.executable, "-m"], command
    if command[2] != "torch.distributed.run":
        done = run_command(1, command[3:], environment, module=command[2])
    else:
        from torch.distributed.run import parse_args

        args = parse_args(list(command[3:]))
        assert args.standalone and args.module, command
        words, variables = args.training_script_args, {**environment, "TORCHELASTIC_RUN_ID": "forked"}
        n = int(args.nproc_per_node)
        done = run_command(n, words, variables, module=args.training_script, launched=True)
    print(done.stdout, done.stderr, sep="", end="", file=sys.__stderr__, flush=True)
    return done.returncode


def _variables(rank: int, n: int) -> dict[str, str]:
    """Those that torchrun sets in a process."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    return {**ranks, "OMP_NUM_THREADS": "1"}


def _begin(variables: Mapping[str, str]) -> None:
    """What a forked process does first."""
    gc.freeze()  # a collection does not visit, and so copy, the pages of the server's objects
    os.environ.clear()
    os.environ.update(variables)
    if cache := variables.get("HF_DATASETS_CACHE"):
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(cache)  # `datasets` has read the variables of the server


def _run_command(
    folder: str,
    rank: int,
    script: Path | None,
    module: str | None,
    words: list[str],
    variables: dict[str, str],
    cwd: Path,
) -> None:
    _begin(variables)
    os.chdir(cwd)
    for stream in (sys.stdout, sys.stderr):
        with open(Path(folder) / f"{stream.name.strip('<>')}{rank}", "wb") as output:
            os.dup2(output.fileno(), stream.fileno())
    torch.set_num_threads(1)
    from sparse_opt.cli.main import main

    try:
        if module is not None:
            sys.argv = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        elif script is None:
            code = main(words)
        else:
            sys.argv = [str(script), *words]
            sys.path[:0] = [str(script.parent), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(processes: list[ForkServerProcess], timeout: float) -> tuple[int | None, str] | None:
    """Return (rank, message) of the first process that fails; the rank is None if not all end in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if any(codes):
            time.sleep(0.2)  # another rank may have failed first, and be about to end
            failed = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
            return min(failed), ", ".join(f"rank {rank} ended with code {code}" for rank, code in failed.items())
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.02)
    running = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in running:  # they print the stacks of their threads
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGABRT)
    for rank in running:
        processes[rank].join(10)
    return None, f"ranks {running} had not ended after {timeout} seconds"


def _run(folder: str, path: str, name: str, backend: str, timeout: float, variables: dict[str, str]) -> None:
    _begin(variables)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(Path(folder) / f"output{rank}", "wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.enable()  # a process that aborts prints the stacks of its threads
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    args = torch.load(Path(folder) / "args", weights_only=False)
    result = inspect.unwrap(getattr(module, name))(rank, *args)  # of a test by `ranks`, what each rank runs
    torch.save(result, Path(folder) / f"result{rank}")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a rank that leaves early would break the others' last collective
        torch.distributed.destroy_process_group()

    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread of gloo that releases the tensors of the last collective takes the interpreter's lock, and
    # the process aborts if the interpreter is ending at that time.
    os._exit(0)
