"""Which backend runs on which GPU, by what was built and what the GPU can do; the GPUs are faked."""

import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sparse_opt import BackendUnavailable, backends, ops

GPUS = {
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "RTX 3090": (8, 6),
    "H100": (9, 0),
    "NVIDIA H200": (9, 0),
    "B200": (10, 0),
    "B300": (10, 3),
    "RTX 5090": (12, 0),
    "GB10": (12, 1),
    "GTX 1080": (6, 1),
}
USUAL = "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"


class Machine:
    """Fakes the GPUs that torch finds, and whether the extension and Triton are installed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch

    def has(self, *gpus: str, arch_list: str = USUAL, current: int = 0, triton: bool = True) -> None:
        backends.compute_capability.cache_clear()
        extension, kernels = ModuleType("_kernels"), ModuleType("triton_kernels")
        extension.build_info = lambda: {"cuda": True, "cuda_missing": "", "arch_list": arch_list}
        extension.BoundParams = lambda *args: SimpleNamespace(arguments=args)
        kernels.interpreted = lambda: False
        for op in backends.OPS:
            setattr(kernels, op, f"triton {op}")
        native = SimpleNamespace(
            chunk_digests=None, **{op: SimpleNamespace(default=f"native {op}") for op in backends.OPS}
        )
        self._monkeypatch.setattr(torch.ops, "sparse_opt_native", native, raising=False)
        replaced = {
            "is_available": lambda: bool(gpus),
            "device_count": lambda: len(gpus),
            "current_device": lambda: current,
            "get_device_capability": lambda index=None: GPUS[gpus[current if index is None else index]],
            "get_device_name": lambda index=None: gpus[current if index is None else index],
        }
        for name, function in replaced.items():
            self._monkeypatch.setattr(torch.cuda, name, function)
        for module in ("native_module", "autograd_module"):
            self._monkeypatch.setattr(backends, module, lambda: (extension, ""))
        no_triton = (None, "triton cannot be imported: it is not here")
        self._monkeypatch.setattr(backends, "triton_module", lambda: (kernels, "") if triton else no_triton)


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.delenv("SPARSE_OPT_BACKEND", raising=False)
    backends._warn_slow_auto.cache_clear()
    yield Machine(monkeypatch)
    backends.compute_capability.cache_clear()


@pytest.mark.parametrize(
    ("arch_list", "taken"),
    [
        (USUAL, {"cuda": "A100, RTX 3090, H100, B200, B300, RTX 5090, GB10", "triton": "V100, T4"}),
        ("9.0a", {"cuda": "H100", "triton": "V100, T4, A100, RTX 3090, B200, B300, RTX 5090, GB10"}),
        ("8.0;9.0a", {"cuda": "A100, RTX 3090, H100", "triton": "T4, B200, B300, RTX 5090, GB10"}),
        ("9.0+PTX", {"cuda": "H100, B200, B300, RTX 5090, GB10", "triton": "V100, T4, A100, RTX 3090"}),
        ("9.0a;9.0+PTX", {"cuda": "H100, B200, GB10", "triton": "T4, A100"}),
        ("10.0", {"cuda": "B200, B300", "triton": "H100, RTX 5090"}),
        ("12.0", {"cuda": "RTX 5090, GB10", "triton": "B300"}),
    ],
)
@pytest.mark.filterwarnings("ignore:sparse_opt runs backend")
def test_auto_takes_the_fastest_that_has_code_for_the_gpu(machine, arch_list, taken):
    for backend, gpus in taken.items():
        for gpu in gpus.split(", "):
            machine.has(gpu, arch_list=arch_list)
            assert backends.choose(torch.device("cuda:0")) == backend, gpu
    machine.has("GTX 1080", arch_list=arch_list)
    assert backends.choose(torch.device("cuda:0")) == "reference"


def choose_and_catch(*indices: int) -> tuple[list[str], list[str]]:
    """What `auto` takes on these GPUs, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chosen = [backends.choose(torch.device("cuda", index)) for index in indices]
    return chosen, [str(warning.message) for warning in caught]


def test_auto_says_once_what_it_passes_over(machine):
    machine.has("T4", "T4")
    why_not_cuda = "T4 has compute capability 7.5, the CUDA kernels need 8.0 or newer"
    warned = f"sparse_opt runs backend 'triton' on cuda: 'cuda' is unavailable: {why_not_cuda}"
    assert choose_and_catch(0, 1, 0) == (["triton"] * 3, [warned])

    machine.has("GTX 1080")
    chosen, warned_of = choose_and_catch(0)
    assert chosen == ["reference"]
    begins = [text.partition(" is unavailable")[0] for text in warned_of]
    assert begins == [f"sparse_opt runs backend 'reference' on cuda: {name!r}" for name in ("cuda", "triton")]

    machine.has("H100")
    assert choose_and_catch(0) == (["cuda"], [])


def test_an_explicit_cuda_raises_with_the_gpu_and_what_was_built(machine):
    machine.has("B200", arch_list="8.0;9.0a")
    with pytest.raises(BackendUnavailable) as raised:
        backends.choose(torch.device("cuda:0"), "cuda")
    assert str(raised.value) == (
        "backend 'cuda' (argument backend) cannot run: B200 has compute capability 10.0, the extension was built for "
        "8.0;9.0a: build it again with TORCH_CUDA_ARCH_LIST=10.0"
    )
    assert backends.choose(torch.device("cuda:0"), "triton") == "triton"


def test_explicit_choices_raise_on_a_gpu_without_code(machine, monkeypatch):
    machine.has("GTX 1080")
    with pytest.raises(BackendUnavailable, match=r"GTX 1080 has compute capability 6\.1, the Triton kernels need 7\.0"):
        backends.choose(torch.device("cuda:0"), "triton")
    monkeypatch.setenv("SPARSE_OPT_BACKEND", "cuda")
    with pytest.raises(BackendUnavailable, match=r"SPARSE_OPT_BACKEND.*GTX 1080 has compute capability 6\.1"):
        backends.functions(torch.device("cuda:0"))


@pytest.mark.filterwarnings("ignore:sparse_opt runs backend")
def test_each_gpu_of_a_machine_is_judged_by_itself(machine):
    machine.has("H100", "T4", "A100", arch_list="8.0;9.0a", triton=False)
    names = ["native indexed_swap_", "reference", "native indexed_swap_"]
    for index, expected in enumerate(names):
        device = torch.device("cuda", index)
        ops = backends.functions(device)
        function = ops.indexed_swap_
        assert (function if isinstance(function, str) else function.__module__.rpartition(".")[2]) == expected
        where = SimpleNamespace(device=device)
        bound = backends.bind([], where, [], [])
        assert (bound is None) == (expected == "reference")
    assert backends.available(torch.device("cuda:0")) == ("reference", "cuda")
    assert backends.available(torch.device("cuda:1")) == ("reference",)


def test_a_device_without_an_index_is_the_current_one(machine):
    machine.has("H100", "T4", current=1)
    assert backends.why_unavailable("cuda", "cuda").startswith("T4 has compute capability 7.5")
    assert backends.why_unavailable("cuda", torch.device("cuda")) == backends.why_unavailable("cuda", "cuda:1")
    assert backends.why_unavailable("cuda", "cuda:0") == ""


def test_without_a_gpu_only_the_build_is_judged(machine):
    machine.has()
    assert backends.available("cuda") == ("reference", "triton", "cuda")


def test_a_gpu_of_rocm_has_no_compute_capability_of_nvidia(machine, monkeypatch):
    machine.has("T4")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (0, 0))
    assert backends.why_unavailable("triton", "cuda:0") == ""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_backend_that_is_offered_for_a_gpu_runs_there(backend):
    """Here nothing is faked: the binary's list and this GPU's capability agree with what a kernel does."""
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if cause := backends.why_unavailable(backend, device):
            pytest.skip(cause)
        dense, compact = torch.zeros(64, device=device), torch.ones(2, device=device)
        indices = torch.tensor([3, 40], dtype=torch.int32, device=device)
        ops.indexed_swap_([dense], compact, indices, [0], [2], backend=backend)
        assert dense.nonzero().view(-1).tolist() == [3, 40]
        assert not compact.any()
