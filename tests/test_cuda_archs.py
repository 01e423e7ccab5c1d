"""Which GPUs a build is for, and which GPUs a binary runs on: lists alone, no GPU and no compiler."""

import subprocess
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from sparse_opt import cuda_archs

# What `nvcc --list-gpu-arch` of CUDA 13.0 prints, and of 12.6.
NVCC_13 = [f"compute_{n}" for n in (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)]
NVCC_12_6 = [f"compute_{n}" for n in (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)]


@pytest.mark.parametrize(
    ("arch_list", "runs_on", "does_not_run_on"),
    [
        ("9.0a", ["9.0"], ["7.0", "7.5", "8.0", "8.6", "8.9", "10.0", "10.3", "12.0", "12.1"]),
        ("9.0a+PTX", ["9.0"], ["8.9", "10.0", "12.0"]),  # PTX of 9.0a is for 9.0 alone too
        ("8.0", ["8.0", "8.6", "8.9"], ["7.5", "8.7", "9.0", "10.0"]),
        ("8.7", ["8.7"], ["8.0", "8.6", "8.9"]),  # an Orin's code and a graphics card's are not exchangeable
        ("8.0+PTX", ["8.0", "8.7", "9.0", "10.3", "12.1"], ["7.0", "7.5"]),
        (
            "8.0;8.6;9.0a;10.0;12.0+PTX",
            ["8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1", "13.0"],
            ["7.0", "7.5", "8.7", "11.0"],
        ),
        ("9.0+PTX", ["9.0", "10.0", "10.3", "11.0", "12.0", "12.1"], ["7.5", "8.0", "8.9"]),
        ("10.0", ["10.0", "10.3"], ["9.0", "11.0", "12.0"]),
        ("10.0a", ["10.0"], ["10.3"]),
        ("10.0f", ["10.0", "10.3"], ["9.0", "11.0", "12.0"]),
        ("10.0f+PTX", ["10.3"], ["12.0"]),
        ("", [], ["8.0", "9.0"]),
    ],
)
def test_a_binary_runs_on_the_gpus_that_its_code_is_for(arch_list, runs_on, does_not_run_on):
    def has_code(capability: str) -> bool:
        major, minor = capability.split(".")
        return cuda_archs.has_code(arch_list, (int(major), int(minor)))

    assert [c for c in runs_on if not has_code(c)] == []
    assert [c for c in does_not_run_on if has_code(c)] == []


@pytest.mark.parametrize(
    ("requested", "archs", "notes"),
    [
        # What a container sets.
        ("7.0 7.5 8.0 8.6 9.0+PTX", "8.0;8.6;9.0a;9.0+PTX", ["7.0, 7.5 left out", "9.0 is built as 9.0a"]),
        ("9.0a;9.0", "9.0a", ["9.0 is built as 9.0a"]),
        ("9.0a+PTX", "9.0a+PTX", []),
        ("8.0;8.0", "8.0", []),
        (" 8.0; 8.6 ;", "8.0;8.6", []),
        ("9.0+PTX", "9.0a;9.0+PTX", ["9.0 is built as 9.0a"]),
        ("7.5+PTX;8.9+PTX", "8.9+PTX", ["7.5+PTX left out"]),
        ("7.0;7.5+PTX", "", ["7.0, 7.5+PTX left out"]),
        ("9.9;8.0", "8.0", ["9.9 left out"]),
    ],
)
def test_a_requested_list_becomes_one_that_the_kernels_compile_for(requested, archs, notes):
    chosen, said = cuda_archs.select(requested, NVCC_13)
    assert chosen == archs
    assert len(said) == len(notes)
    assert all(note.startswith(begin) for note, begin in zip(said, notes, strict=True)), said


def test_what_is_no_architecture_is_refused():
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST has 'Hopper', expected entries such as 8.0"):
        cuda_archs.select("8.0 Hopper", NVCC_13)


def test_the_notes_give_the_reason():
    _, (old, unknown) = cuda_archs.select("7.5 10.0", NVCC_12_6)
    assert old == "7.5 left out: the CUDA kernels need 8.0 or newer"
    assert unknown == "10.0 left out: this nvcc cannot compile for it"


@pytest.mark.parametrize(
    ("known", "archs"),
    [(NVCC_13, "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"), (NVCC_12_6, "8.0;8.6;8.9+PTX;9.0a")],
    ids=["13.0", "12.6"],
)
def test_without_a_request_the_usual_gpus_and_the_newest_as_ptx(known, archs):
    assert cuda_archs.select("", known) == (archs, ())


@pytest.mark.parametrize("requested", ["8.7", "9.0+PTX", "8.0 8.6+PTX", "9.0a;10.0a;12.0"])
def test_lists_are_read_as_torch_reads_them(requested, monkeypatch):
    """torch makes nvcc's flags of what is selected: the same ones as of the request, but for 9.0."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", requested)
    of_request = set(cpp_extension._get_cuda_arch_flags())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", cuda_archs.select(requested, NVCC_13)[0])
    of_selected = set(cpp_extension._get_cuda_arch_flags())
    wgmma = "-gencode=arch=compute_90a,code=sm_90a"
    assert of_selected == of_request | ({wgmma} if any("compute_90," in flag for flag in of_request) else set())


@pytest.mark.nvcc
@pytest.mark.parametrize("requested", ["", "7.0 7.5 8.0 8.7 9.0+PTX 10.0a 12.1+PTX"])
def test_nvcc_accepts_the_flags_of_a_selected_list(requested, monkeypatch, tmp_path: Path):
    known = subprocess.check_output(["nvcc", "--list-gpu-arch"], text=True).split()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", cuda_archs.select(requested, known)[0])
    source = tmp_path / "kernel.cu"
    source.write_text("__global__ void kernel(float* x) { *x += 1.0f; }\n")
    command = ["nvcc", *cpp_extension._get_cuda_arch_flags(), "-fatbin", str(source), "-o", str(tmp_path / "fatbin")]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
