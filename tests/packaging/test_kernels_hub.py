"""The folder for Hugging Face's `kernels`, with the extension that is built: its package works without sparse_opt."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch

from sparse_opt import backends, ops

HAS_KERNELS = importlib.util.find_spec("kernels") is not None
NATIVE = "sparse_opt_native"  # the namespace of the library in a checkout

# In a process of its own, because a process loads a library once. `kernels` imports by path and name, too.
LOAD = {
    "import": """
import importlib.util, json
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
package = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
""",
    "get_local_kernel": """
import kernels
package = kernels.get_local_kernel(variant.parents[1])
assert [loaded.metadata.name.python_name for loaded in kernels.get_loaded_kernels()] == ["sparse_opt"]
""",
}
RUN = """
import sys
from pathlib import Path
import torch
variant, data = map(Path, sys.argv[1:])
{load}
assert not [name for name in sys.modules if name.split(".")[0] in ("sparse_opt", "xxhash")]
arguments = torch.load(data)
device = arguments["grad"].device
before = arguments["adamw"][0][0]._version
package.indexed_adamw_(*arguments["adamw"], grad=arguments["grad"])
assert arguments["adamw"][0][0]._version > before
package.masked_grad_gather_(*arguments["gather"])
changed = package.delta_encode([torch.zeros(3, device=device)], [torch.tensor([0.0, 2, 0], device=device)])
assert [part.tolist() for part in changed] == [[1], [2.0], [1]]
try:
    package.masked_grad_gather_(*arguments["gather"], backend="triton")
except package.BackendUnavailable as error:
    assert "'triton'" in str(error)
else:
    raise AssertionError("triton ran")
torch.save(arguments, data)
"""

# Two builds of one interface, and sparse-opt itself.
RUN_TWO = """
import sys
from pathlib import Path
import kernels, torch
from sparse_opt import ops
packages = [kernels.get_local_kernel(Path(folder)) for folder in sys.argv[1:]]
assert len({package.__name__ for package in packages}) == 2
assert packages[0].backends._kernels is not packages[1].backends._kernels
dense, indices = [torch.arange(6.0)], torch.tensor([1, 4])
for module in (*packages, ops):
    out = torch.empty(2)
    with torch.profiler.profile() as profile:
        module.masked_grad_gather_(out, dense, indices, [0], [2])
    assert out.tolist() == [1, 4]
    print(*sorted({event.name for event in profile.events() if event.name.startswith("sparse_opt")}))
"""


@pytest.fixture(scope="module")
def variant(checkout, tmp_path_factory) -> Path:
    library, cause = backends.native_module()
    if library is None:
        pytest.skip("needs the extension: " + cause)
    write = runpy.run_path(str(checkout / ".ci/kernels_hub.py"))["write"]
    names = {"public": "sparse_opt", "native": NATIVE}
    return write(Path(library.__file__), library.build_info(), tmp_path_factory.mktemp("hub"), hash="test", **names)


def adamw_and_gather() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(64, 48, generator=generator), torch.randn(300, generator=generator)]
    grads = [torch.randn(p.shape, generator=generator) for p in params]
    counts = [600, 70]
    positions = [
        torch.randperm(p.numel(), generator=generator)[:n].sort()[0] for p, n in zip(params, counts, strict=True)
    ]
    segments = torch.cat(positions).int(), [0, 600], [600, 670]
    exp_avg, exp_avg_sq = torch.randn(670, generator=generator), torch.rand(670, generator=generator)
    return {
        "adamw": [params, *segments, exp_avg, exp_avg_sq, torch.tensor(1e-2), torch.tensor([3.0, 7.0])],
        "grad": torch.randn(670, generator=generator),
        "gather": [torch.full((670,), torch.nan), grads, *segments],
    }


@pytest.mark.parametrize("loader", LOAD)
def test_the_package_computes_what_sparse_opt_does(variant, loader, device, python, tmp_path):
    """With the backend that the package takes by default."""
    if loader == "get_local_kernel" and not HAS_KERNELS:
        pytest.skip("needs the package kernels")
    expected = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), adamw_and_gather())
    start = expected["adamw"][0][0].clone()
    torch.save(expected, tmp_path / "data.pt")
    ran = python("-c", RUN.format(load=LOAD[loader]), variant, tmp_path / "data.pt", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    ops.indexed_adamw_(*expected["adamw"], grad=expected["grad"], backend=device.type)
    ops.masked_grad_gather_(*expected["gather"], backend=device.type)
    assert not torch.equal(expected["adamw"][0][0], start)
    torch.testing.assert_close(torch.load(tmp_path / "data.pt"), expected, rtol=0, atol=0)


@pytest.mark.skipif(not HAS_KERNELS, reason="needs the package kernels")
def test_two_builds_are_loaded_in_one_process(checkout, variant, python, tmp_path):
    write = runpy.run_path(str(checkout / ".ci/kernels_hub.py"))["write"]
    library, _ = backends.native_module()
    for hash in "ab":
        # A build with SPARSE_OPT_BUILD_HASH takes minutes: the name, of the same length, is replaced in the library.
        native = f"sparse_opt_hash_{hash}"
        built = tmp_path / hash / "_kernels.abi3.so"
        built.parent.mkdir()
        name, found = f"\0{NATIVE}\0".encode(), (variant / "_kernels.abi3.so").read_bytes()
        assert found.count(name) == 1 and len(native) == len(NATIVE)
        built.write_bytes(found.replace(name, f"\0{native}\0".encode()))
        names = {"public": f"sparse_opt_cpu_{hash}", "native": native}
        write(built, library.build_info(), tmp_path / hash, hash=hash, **names)
    ran = python("-c", RUN_TWO, tmp_path / "a", tmp_path / "b", cwd=checkout)
    assert ran.returncode == 0, ran.stderr
    called = [set(line.split()) for line in ran.stdout.splitlines()]
    expected = [
        ("sparse_opt_cpu_a", "sparse_opt_hash_a"),
        ("sparse_opt_cpu_b", "sparse_opt_hash_b"),
        ("sparse_opt", NATIVE),
    ]
    assert called == [{f"{name}::masked_grad_gather_" for name in names} for names in expected]
