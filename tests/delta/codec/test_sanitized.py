"""The CPU decoder stays within its memory for any input: fuzz_decoder.cpp under gcc's sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra"]
MODES = "packed-elias packed-bitmap packed-raw tight-coded tight-raw".split()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("needs g++ on PATH")
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "empty.cpp").write_text("int main() {}\n")
    command = [found, *FLAGS, "empty.cpp", "-o", "empty"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if built.returncode != 0:
        pytest.skip(f"needs g++ with its sanitizers: {built.stderr.strip().splitlines()[-1]}")
    return found


@pytest.fixture(scope="module")
def fuzzer(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("fuzz") / "fuzz_decoder"
    sources = [*sorted((CSRC / "delta").glob("patch_*_cpu.cpp")), HERE / "fuzz_decoder.cpp"]
    subprocess.run([compiler, *FLAGS, f"-I{CSRC}", *sources, "-o", program], check=True)
    return program


def test_damaged_records_stay_within_memory(fuzzer):
    rounds = 150
    run = subprocess.run([fuzzer, str(rounds), "18"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    shown = dict(line.split() for line in run.stdout.splitlines())
    assert int(shown.pop("decoded")) == 2 * 4 * 2 * 3 * rounds
    assert all(int(shown[mode]) > 0 for mode in MODES), "every form of a record is among the seeds"
