"""SparseDelta and DeltaSet: made, saved, applied, removed, merged and switched, bit for bit, and refused."""

import contextlib
import copy
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from damage import flip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparse_opt import DeltaLog, DeltaSet, MaskSet, SparseAdamW, SparseDelta
from sparse_opt.delta.sparse_delta import CONFIG_FILE, DELTA_FILE
from sparse_opt.errors import DataError, DeltaError, DeltaLogError


class Model(nn.Module):
    """A matrix in bf16, a tied one, experts in three dimensions, and a buffer and parameters of other dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(32, 64, dtype=torch.bfloat16)
        self.head = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.experts = nn.Parameter(torch.empty(4, 64, 64, dtype=torch.bfloat16))
        self.large = nn.Parameter(torch.empty(300, 400, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.halves = nn.Parameter(torch.empty(9, dtype=torch.float16))
        self.register_buffer("doubles", torch.empty(5, 7, dtype=torch.float64))
        self.register_buffer("counter", torch.tensor(seed))
        self.register_buffer("bits", torch.ones(33, dtype=torch.bool))
        with torch.no_grad():
            for tensor in self.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=source) * 0.02)


def bits(model: nn.Module) -> dict[str, bytes]:
    return {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in model.state_dict().items()}


@torch.no_grad()
def trained(base: nn.Module, share: float = 0.05, seed: int = 1, only: str = "") -> nn.Module:
    """A copy in which a share of the elements of the tensors has other bits: a few steps up or down, -0.0, NaN."""
    model, source = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.startswith(only) and name != "head.weight":
            chosen = torch.rand(tensor.shape, generator=source) < share
            chosen.view(-1)[0] = True
            moved = (
                ~tensor if tensor.dtype == torch.bool else tensor + 1 if tensor.dtype == torch.int64 else tensor * 1.02
            )
            tensor.copy_(torch.where(chosen, moved, tensor))
            if tensor.is_floating_point() and tensor.numel() > 2:
                tensor.view(-1)[1], tensor.view(-1)[2] = -0.0, float("nan")
    return model


def test_saved_loaded_applied_and_removed(tmp_path):
    base = Model()
    tuned = trained(base)
    SparseDelta.from_models(base, tuned, metadata={"note": "é"}).save_pretrained(tmp_path / "delta")
    assert sorted(path.name for path in (tmp_path / "delta").iterdir()) == [DELTA_FILE, CONFIG_FILE]
    delta = SparseDelta.from_pretrained(tmp_path / "delta")
    expected = {
        n: int((t.view(-1, 1).view(torch.uint8) != tuned.state_dict()[n].view(-1, 1).view(torch.uint8)).any(1).sum())
        for n, t in base.state_dict().items()
        if n != "head.weight"
    }
    assert delta.counts == expected and delta.changed == sum(expected.values())
    assert delta.metadata == {"note": "é"}
    before, model = bits(base), copy.deepcopy(base)
    delta.apply_(model)
    assert bits(model) == bits(tuned)
    with pytest.raises(DeltaError, match="applied to this model already"):
        delta.apply_(model)
    delta.remove_(model)
    assert bits(model) == before
    with contextlib.suppress(KeyError), delta.active(model):
        assert bits(model) == bits(tuned)
        raise KeyError("body")
    assert bits(model) == before
    with pytest.raises(DeltaError, match="not applied"):
        delta.remove_(model)


def test_an_empty_delta():
    base = Model()
    delta = SparseDelta.from_models(base, copy.deepcopy(base))
    assert (delta.changed, delta.changes, delta.base_digest) == (0, {}, delta.result_digest)
    with delta.active(base):
        pass


def test_contexts_of_several_deltas():
    base = Model()
    first = trained(base, only="experts")
    second = trained(first, only="large", seed=2)
    third = trained(second, only="experts", seed=3)
    a, b, c = (SparseDelta.from_models(*pair) for pair in ((base, first), (first, second), (second, third)))
    model, before = copy.deepcopy(base), bits(base)
    with a.active(model), b.active(model), c.active(model):
        assert bits(model) == bits(third)
        with pytest.raises(DeltaError, match="experts was changed by other code"):
            a.remove_(model)  # `c` changes the same tensor
        assert bits(model) == bits(third)
    assert bits(model) == before
    with a.active(model), pytest.raises(DeltaError, match="experts has the digest"):
        a.active(copy.deepcopy(model)).__enter__()


def test_other_models_are_refused_and_keep_their_bits():
    base = Model()
    delta = SparseDelta.from_models(
        base, trained(base, only="large"), metadata={"base_model": "b", "base_revision": "r"}
    )

    def refused(change: Any, said: str) -> None:
        model = copy.deepcopy(base)
        change(model)
        before = bits(model)
        with pytest.raises(DeltaError, match=said) as caught:
            delta.apply_(model)
        assert "\n" not in str(caught.value)
        assert bits(model) == before

    with torch.no_grad():
        # A tensor that the delta does not change is compared, too.
        refused(lambda m: m.experts[0, 0, 0].add_(1), "experts has the digest .* the delta is for b at revision r")
        refused(lambda m: m.large[0, 0].add_(1), "large has the digest")
        refused(lambda m: delattr(m, "scale"), "has no tensor scale: the delta is for b at revision r")
        refused(lambda m: m.float(), "experts of the model is float32")
        refused(
            lambda m: setattr(m, "large", nn.Parameter(m.large.t())), r"large of the model is bfloat16 \[400, 300\]"
        )
        refused(
            lambda m: setattr(m, "large", nn.Parameter(m.large.t().contiguous().t())),
            "large of the model is not a contig",
        )
    for other in (nn.Linear(3, 3), copy.deepcopy(base).half()):
        with pytest.raises(DeltaError, match="the trained model is not of the base's architecture") as caught:
            SparseDelta.from_models(base, other)
        assert "\n" not in str(caught.value)
    with pytest.raises(DeltaError, match="the base: state entry"):
        SparseDelta.from_models(copy.deepcopy(base).to("meta"), base)


def test_tensors_that_only_the_model_ties():
    base = Model()
    untied = copy.deepcopy(base)
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    tuned = copy.deepcopy(untied)
    with torch.no_grad():
        tuned.embed.weight[0] = tuned.head.weight[0] = 1.0
    delta, before = SparseDelta.from_models(untied, tuned), bits(base)
    with delta.active(base):
        assert bits(base) == bits(tuned)
    assert bits(base) == before
    tied = SparseDelta.from_models(base, trained(base))
    with tied.active(untied):  # the head, which is not in this delta, keeps its bits
        assert bits(untied)["head.weight"] == before["head.weight"] != bits(untied)["embed.weight"]


def test_a_replaced_parameter_is_found():
    base = Model()
    delta = SparseDelta.from_models(base, trained(base))
    delta.apply_(base)
    base.large = nn.Parameter(base.large.detach().clone())
    before = bits(base)
    with pytest.raises(DeltaError, match="large of the model was replaced"):
        delta.remove_(base)
    assert bits(base) == before


def test_a_set_switches():
    base = Model()
    models: dict[str | None, nn.Module] = {
        None: copy.deepcopy(base),
        "a": trained(base, 0.05, 1),
        "b": trained(base, 0.4, 2),
    }
    switch = DeltaSet(base, {str(n): SparseDelta.from_models(base, m) for n, m in models.items() if n})
    for name in ("a", "b", "b", None, "b", "a", None):
        switch.activate(name)
        assert bits(base) == bits(models[name]) and switch.active == name
    assert switch.nbytes <= 14 * sum(delta.changed for delta in switch._deltas.values())
    with pytest.raises(DeltaError, match="there is no delta 'c'; expected one of a, b"):
        switch.activate("c")
    switch.activate("a")
    with torch.no_grad():
        base.large[0, 0] = 3.0
    before = bits(base)
    with pytest.raises(DeltaError, match="activate: large was changed by other code"):
        switch.activate("b")
    assert bits(base) == before and switch.active == "a"
    with torch.no_grad():
        base.large[0, 0] = models["a"].large[0, 0]
    switch.activate("b")
    assert bits(base) == bits(models["b"])


@pytest.mark.parametrize("pattern", ["element", "run16", "tile64"])
def test_the_delta_of_an_optimizer(pattern):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)).bfloat16()
    base = copy.deepcopy(model)
    opt = SparseAdamW(model, MaskSet.random(model, density=0.25, pattern=pattern, seed=1), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        model(torch.randn(4, 128).bfloat16()).square().mean().backward()
        opt.step()
        opt.zero_grad()
    delta = opt.delta()
    assert delta.metadata == {"mask_pattern": pattern, "mask_digest": opt.mask.digest}
    assert 0 < delta.changed <= opt.mask.nnz
    # Tiles and runs are stored without positions of elements.
    assert {change.run_length for change in delta.changes.values()} == {
        {"element": 1, "run16": 16, "tile64": 64}[pattern]
    }
    with opt.base_weights():
        for call in (delta.apply_, lambda _: opt.delta(), lambda model: SparseDelta.from_models(base, model)):
            with pytest.raises((DeltaError, RuntimeError), match="holds its base weights"):
                call(model)
    with delta.active(base):
        assert bits(base) == bits(model)
    opt = SparseAdamW(model, opt.mask, lr=1e-2, keep_base_weights=False)
    with pytest.raises(RuntimeError, match="delta: the optimizer was built with keep_base_weights=False"):
        opt.delta()


def test_between_two_steps_of_a_log(tmp_path):
    base = Model()
    models = [base, trained(base, seed=1), trained(base, seed=2)]
    with DeltaLog.create(tmp_path / "log", base, metadata={"model": "m"}) as log:
        for step in (1, 2):
            log.append(step, models[step])
    log = DeltaLog.open(tmp_path / "log")
    delta = log.between(1, 2)
    assert (delta.base_digest, delta.result_digest) == (log.digest(1), log.digest(2))
    assert "base_model" not in delta.metadata and log.between(0, 2).metadata["base_model"] == "m"
    with delta.active(models[1]):
        assert bits(models[1]) == bits(models[2])
    with pytest.raises(DeltaLogError, match="expected a step and a later one"):
        log.between(2, 1)


def test_merged():
    base = Model()
    a, b = trained(base, only="experts"), trained(base, only="large")
    with torch.no_grad():
        a.large[-1, -1], b.experts[-1, -1, -1] = 2.0, 3.0
    first, second = SparseDelta.from_models(base, a), SparseDelta.from_models(base, b)
    both = first.merged(second, base)
    expected = copy.deepcopy(a)
    with torch.no_grad():
        expected.experts[-1, -1, -1] = 3.0
        expected.large.copy_(b.large)
        expected.large[-1, -1] = 2.0
    with both.active(base):
        assert bits(base) == bits(expected)
    c = trained(a, only="experts", seed=5)
    third = SparseDelta.from_models(base, c)
    with pytest.raises(DeltaError, match=r"experts: both deltas change \d+ elements, the first at 0"):
        first.merged(third, base)
    x, y, z = (model.experts.detach().view(-1)[3:] for model in (base, a, c))  # 0 to 2 have NaN
    overlap = (x.view(torch.int16) != y.view(torch.int16)) & (x.view(torch.int16) != z.view(torch.int16))
    with first.merged(third, base, add=True).active(base):
        found = base.experts.detach().view(-1)[3:][overlap]
    x, y, z = (values[overlap].float() for values in (x, y, z))
    assert len(found) and torch.equal(found, (x + (y - x) + (z - x)).bfloat16())
    other = SparseDelta.from_models(a, trained(a))
    with pytest.raises(DeltaError, match="different bases: experts has the digests"):
        first.merged(other, base)


@pytest.fixture
def folder(tmp_path):
    base = Model()
    SparseDelta.from_models(base, trained(base)).save_pretrained(tmp_path / "delta")
    return tmp_path / "delta"


def test_damaged_files_are_refused_in_one_line(folder, tmp_path, with_header):
    def refused(change: Any, said: str, where: str = DELTA_FILE) -> None:
        copied = tmp_path / "copy"
        shutil.rmtree(copied, ignore_errors=True)
        shutil.copytree(folder, copied)
        change(copied / where)
        with pytest.raises(DeltaError, match=said) as caught:
            SparseDelta.from_pretrained(copied)
        assert "\n" not in str(caught.value) and str(copied) in str(caught.value)

    def of_header(**metadata: str) -> Any:
        return lambda path: with_header(path, lambda header: header["__metadata__"].update(metadata))

    refused(Path.unlink, f"holds no delta: {DELTA_FILE} is missing")
    refused(Path.unlink, f"holds no delta: {CONFIG_FILE} is missing", CONFIG_FILE)
    refused(lambda path: path.write_bytes(path.read_bytes()[:-9]), "is damaged: its tensors end at byte")
    refused(flip, "its payload_digest is")
    refused(of_header(metadata='{"a":"b"}'), "its header_digest is")
    refused(of_header(format="other"), "its format is 'other', expected 'sparse-opt delta'")

    def at_packed(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        save_file({**load_file(path), "large.heads": torch.zeros(1, dtype=torch.uint16)}, path, metadata)

    refused(
        at_packed,
        f"{DELTA_FILE}: its patches are of level 'packed', which can no longer be read: apply the delta with the "
        "version of sparse-opt that wrote it, sparse-opt delta apply DELTA BASE -o TUNED, and write it again with this "
        "one: sparse-opt delta diff BASE TUNED -o NEW_DELTA",
    )
    refused(of_header(format_version="9"), "its format_version is '9', expected '1'")
    for text in ("[" * 10**5, '{"header_digest": "0"}'):
        refused(lambda path, text=text: path.write_text(text), "damaged", CONFIG_FILE)
    with pytest.raises(DataError, match="cannot read ../no/such/folder"):
        SparseDelta.from_pretrained("../no/such/folder")
    with pytest.raises(DeltaError, match="is a folder, which has none"):
        SparseDelta.from_pretrained(folder, revision="main")
    with pytest.raises(DeltaError, match="cannot be written"):
        SparseDelta.from_pretrained(folder).save_pretrained(folder / DELTA_FILE / "inside")


@pytest.mark.parametrize(
    ("runs", "run_length", "said"),
    [
        ([3, 999_999], 64, "its runs do not ascend within the tensor"),
        ([3, 4], 63, "its runs have the length 63"),
        ([3], 64, "the change of w: a count is larger than its tensor"),
        ([3, 4], 64, "the change of w is damaged: its result has the digest"),
    ],
)
def test_a_damaged_change_under_right_digests(tmp_path, runs, run_length, said):
    base, tuned = torch.zeros(64, 8192), torch.zeros(64, 8192)
    tuned[1, 64:192] = 1
    delta = SparseDelta.from_models({"w": base}, {"w": tuned})
    assert delta.changes["w"].runs.tolist() == [129, 130]
    delta.changes["w"] = replace(delta.changes["w"], runs=torch.tensor(runs, dtype=torch.uint32), run_length=run_length)
    delta.save_pretrained(tmp_path)
    with pytest.raises(DeltaError, match=said) as caught:
        SparseDelta.from_pretrained(tmp_path).trained("w", base)
    assert "\n" not in str(caught.value)


class Hub:
    """The calls of `huggingface_hub` that a push makes, and the files that it uploads."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.calls = root, []
        monkeypatch.setattr("huggingface_hub.HfApi", lambda token=None: self)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(("create_repo", repo_id, options))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> str:
        self.calls.append(("upload_folder", repo_id, options))
        shutil.copytree(folder_path, self.root / repo_id)
        return f"https://huggingface.co/{repo_id}"

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.calls.append(("snapshot_download", name, options))
        return str(self.root / name)


def test_push_and_read_from_the_hub(folder, tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub", monkeypatch)
    delta = SparseDelta.from_pretrained(folder)
    delta.metadata |= {"base_model": "org/base", "base_revision": "abc"}
    assert delta.push_to_hub("user/my-delta", private=True) == "https://huggingface.co/user/my-delta"
    card = (tmp_path / "hub" / "user" / "my-delta" / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\A---\n(.*\n)*base_model: org/base\n(.*\n)*---\n# my-delta\n", card)
    assert f"{delta.changed:,} of {delta.layout.numel:,} weights" in card and delta.base_digest in card
    again = SparseDelta.from_pretrained("user/my-delta", revision="v1")
    assert (again.result_digest, again.metadata) == (delta.result_digest, delta.metadata)
    assert [(call, options) for call, _, options in hub.calls] == [
        ("create_repo", {"private": True, "exist_ok": True}),
        ("upload_folder", {"revision": None, "commit_message": "Upload a delta"}),
        ("snapshot_download", {"revision": "v1", "token": None, "allow_patterns": [DELTA_FILE, CONFIG_FILE]}),
    ]


def adamw_step(numel: int, share: float) -> tuple[Tensor, Tensor]:
    """bf16 weights before and after one step of torch's AdamW on fp32 copies, on a random share of them."""
    torch.manual_seed(0)
    before = (torch.randn(numel) * 0.02).bfloat16()
    weight = nn.Parameter(before.float())
    weight.grad = torch.randn(numel)
    torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0).step()
    return before, torch.where(torch.rand(numel) < share, weight.detach().bfloat16(), before)


def test_an_independent_reader_in_another_process(tmp_path, states, same_bits):
    large, after = adamw_step(600_000, 0.1)  # more than one tile
    source = torch.Generator().manual_seed(1)
    base = states.state() | {"adamw": large, "tiles": torch.randn(256, 128, generator=source)}
    base |= {f"wide.{dtype}": states.bits((70_000,), dtype) for dtype in (torch.float32, torch.int64, torch.uint8)}
    tuned = states.change(base) | {"adamw": after, "tiles": base["tiles"].clone()}
    tuned["tiles"][64:128, 64:] += 1
    SparseDelta.from_models(base, tuned).save_pretrained(tmp_path)
    save_file(base, tmp_path / "base.safetensors")
    files = [tmp_path, tmp_path / "base.safetensors", tmp_path / "out.safetensors"]
    subprocess.run([sys.executable, Path(__file__).with_name("delta_reader.py"), *files], check=True)
    same_bits(load_file(tmp_path / "out.safetensors"), tuned)
