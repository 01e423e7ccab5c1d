"""Run one step of the Makefile: print what it does and how long it took, and write the command's output to a log file.

    step.py [--stamp FILE] TITLE COMMAND...

The log is build/logs/TITLE.log; if the command fails, its path and its last lines are printed. Lines that begin with
"sparse-opt: " are always printed, and on a terminal ninja's count of compiled files. --stamp creates FILE after success
with the time at which the step began: a source edited during the step is newer than FILE, so make repeats the step.
"""

import argparse
import collections
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

TERMINAL = sys.stdout.isatty()


def show(text, end="\n"):
    """On a terminal, in place of an unfinished line."""
    print("\r\033[K" * TERMINAL + text, end=end, flush=True)


def run(command, title, log_path):
    last_lines = collections.deque(maxlen=30)
    with (
        open(log_path, "w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        log.write(f"{shlex.join(command)}\n")
        for line in process.stdout:
            log.write(line)
            last_lines.append(line)
            compiled = re.match(r"\[(\d+)/(\d+)\]", line)
            if line.startswith("sparse-opt: "):
                show(line.rstrip())
            elif compiled and TERMINAL:
                show(f"{title}: {compiled[1]} of {compiled[2]} ...", end="")
    return process.returncode, "".join(last_lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stamp", type=Path)
    parser.add_argument("title")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()

    title = arguments.title
    log_path = Path("build", "logs", re.sub(r"\W+", "-", title).strip("-") + ".log")
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_path.write_text("")
    began = log_path.stat().st_mtime_ns  # by the file system's clock, as the sources' times
    show(f"{title} ...", end="" if TERMINAL else "\n")
    status, last_lines = run(arguments.command, title, log_path)
    took = f"{(time.time_ns() - began) / 1e9:.0f} s"
    if status:
        show(f"{title}: failed after {took}; the end of {log_path}:\n{last_lines.rstrip()}")
        sys.exit(1)
    show(f"{title}: {took}")
    if arguments.stamp:
        arguments.stamp.touch()
        os.utime(arguments.stamp, ns=(began, began))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
