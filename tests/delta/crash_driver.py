"""One scenario of a log, over and over, each time in a forked process with a fault at a later call than before.

    LD_PRELOAD=faults.so python crash_driver.py

reads lines of a folder, a scenario (create, append or queue) and a fault (killed or full), and runs one after
the other. FOLDER/start, where it is there, is the log that a scenario begins with. Prints "n acknowledged step ..." for
what was acknowledged at the n-th fault, and "n done" where the scenario came to its end without meeting one.
"""

import ctypes
import os
import shutil
import sys
import traceback
from pathlib import Path

import torch

from sparse_opt import DeltaLog, MaskSet
from sparse_opt.errors import DeltaLogError

MODES = {"killed": 1, "full": 2}
MET, NOT_MET = 0, 3
faults = ctypes.CDLL(None)


def state_at(step: int) -> dict[str, torch.Tensor]:
    state = {"w": torch.arange(600.0), "n": torch.tensor(step)}
    for s in range(1, step + 1):
        state["w"][s % 7 :: 7] += s
    return state


def say(n: int, *words: object) -> None:
    # In one call: the thread that writes may be killed while this one prints.
    os.write(1, (" ".join(map(str, (n, *words))) + "\n").encode())


def acknowledge(n: int, *steps: int) -> None:
    say(n, "acknowledged", *steps)


def work(scenario: str, directory: Path, n: int) -> None:
    if scenario == "create":
        mask = MaskSet.from_bool({"w": torch.arange(600) % 3 == 0})
        DeltaLog.create(directory, state_at(0), mask=mask)
        acknowledge(n, 0)
    else:
        log = DeltaLog.open(directory)
        handed = [log.append(step, state_at(step)) for step in ((8, 9) if scenario == "queue" else (8,))]
        for one in handed:
            acknowledge(n, one.wait().step)


def work_on_a_full_disk(_: str, directory: Path, n: int) -> None:
    log = DeltaLog.open(directory)
    try:
        log.append(8, state_at(8)).wait()
    except DeltaLogError as error:
        refusal = str(error)
    else:
        return
    finally:
        faults.faults_arm(b"", 0, 0)
    assert "No space left on device" in refusal, refusal
    assert log.verify() == [], log.verify()
    # The disk has free space again.
    log.close()
    assert [log.append(step, state_at(step)).wait().kind for step in (10, 11)] == ["patch", "patch"]
    log.close()
    acknowledge(n, 10, 11)


def main(root: Path, scenario: str, mode: str) -> None:
    torch.set_num_threads(1)  # so that no thread pool is lost in the forks
    for n in range(1, 200):
        directory = root / str(n)
        if (root / "start").exists():
            shutil.copytree(root / "start", directory)
        child = os.fork()
        if not child:
            status = 1
            try:
                faults.faults_arm(str(directory).encode(), n, MODES[mode])
                (work if mode == "killed" else work_on_a_full_disk)(scenario, directory, n)
                status = NOT_MET if mode == "killed" or faults.faults_seen() < n else MET
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == NOT_MET:
            say(n, "done")
            return
        if status != (-9 if mode == "killed" else MET):
            sys.exit(f"{scenario}, fault {n}: exit status {status}")
    sys.exit(f"{scenario}: no end")


if __name__ == "__main__":
    for line in sys.stdin:
        folder, *what = line.rsplit(maxsplit=2)
        main(Path(folder), *what)
