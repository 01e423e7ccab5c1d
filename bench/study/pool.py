"""Several runs of the study at once, each in a process of its own.

A small model leaves most of a large GPU idle, because sampling is bound by the host, so several runs share one. With
more than one GPU, a run gets the GPU that has the fewest. The processes are forked from a server that has imported the
packages, which takes seconds, and has not touched the GPU. A run whose process fails is reported, and the others go on.
The processes end with this one, however it ends.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

# A package that is not installed is left out by the server.
_PRELOADED = ["sparse_opt.bench.study.preloaded", "reasoning_gym"]


class Ended(NamedTuple):
    """A job that has ended: its result, or the reason why there is none."""

    job: Any
    result: Any
    failure: str | None


class Pool:
    """Processes that call `work(world, job)`; a context, which ends them on exit.

    Args:
        work: a function of a module, which the processes import; jobs are its second argument, and have a name.
        world: its first argument.
        size: processes at once.
        logs: folder for what the processes print.
        gpus: the GPUs, named as in CUDA_VISIBLE_DEVICES; each process sees one of them. If empty, all processes see
            what this one sees.
    """

    def __init__(self, work: Callable[[Any, Any], Any], world: Any, size: int, logs: Path, gpus: Sequence[str] = ()):
        self._work, self._world, self.size, self._logs, self._gpus = work, world, size, logs, list(gpus)
        self._gpu_of: dict[Any, str] = {}
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._running: dict[Any, tuple[Any, connection.Connection]] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def running(self) -> list[Any]:
        """The jobs that have not ended."""
        return list(self._running)

    @property
    def is_full(self) -> bool:
        """Whether as many jobs run as may."""
        return len(self._running) >= self.size

    def _log(self, job: Any) -> Path:
        return self._logs / f"{job.name.replace(' ', '_')}.log"

    def start(self, job: Any) -> None:
        """Begin a job."""
        receiver, sender = self._context.Pipe(duplex=False)
        threads = max(1, (os.cpu_count() or 1) // self.size)
        self._logs.mkdir(parents=True, exist_ok=True)
        if self._gpus:
            taken = [self._gpu_of[other] for other in self._running]
            self._gpu_of[job] = min(self._gpus, key=taken.count)
        arguments = (self._work, self._world, job, self._log(job), sender, threads, self._gpu_of.get(job))
        process = self._context.Process(target=_call, args=arguments, daemon=True)
        process.start()
        sender.close()
        self._running[job] = (process, receiver)

    def wait(self, seconds: float) -> list[Ended]:
        """The jobs that end within this time, as soon as there is one."""
        receivers = {receiver: job for job, (_, receiver) in self._running.items()}
        found = []
        for receiver in connection.wait(list(receivers), None if seconds == float("inf") else max(0.0, seconds)):
            job = receivers[receiver]  # type: ignore[index]  # typed to wait for sockets too
            process, pipe = self._running.pop(job)
            try:
                result, failure = pipe.recv()
            except EOFError:
                process.join()
                result, failure = None, f"its process ended with exit code {process.exitcode}, see {self._log(job)}"
            process.join()
            pipe.close()
            found.append(Ended(job, result, failure))
        return found

    def stop(self) -> list[Any]:
        """End the processes that still run, and return their jobs."""
        jobs = self.running
        for process, _ in self._running.values():
            process.terminate()
        for process, pipe in self._running.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self._running.clear()
        return jobs


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Does not initialize CUDA."""
    import torch

    n = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return named[:n] or [str(i) for i in range(n)]


def _call(
    work: Callable[[Any, Any], Any], world: Any, job: Any, log: Path, sender: Any, threads: int, gpu: str | None
) -> None:
    """The main function of a process: send (result, None), or (None, the error); what it prints goes to the log."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when CUDA is initialized, which nothing has done yet
    import torch

    from sparse_opt.errors import SparseOptError
    from sparse_opt.progress import hide_progress_bars

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; this process is ended by its parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    hide_progress_bars(always=True)
    # The lines of several runs at once would be mixed.
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    outcome: tuple[Any, str | None]
    try:
        outcome = work(world, job), None
    except (SparseOptError, OSError) as error:
        outcome = None, str(error)
    except Exception:  # a bug of this run, of any type: its traceback is reported, and the other runs go on
        outcome = None, traceback.format_exc()
    sender.send(outcome)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
