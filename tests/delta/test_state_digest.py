"""Digests of tensors against the xxhash package: every branch of XXH3 by length, any alignment, whole lists."""

import random
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash
from logged_dtypes import DTYPES
from torch import Tensor

from sparse_opt.delta import digest as state_digest
from sparse_opt.delta.digest import CHUNK, StateDigest

# Where XXH3 takes another branch, a block or a chunk ends, and a stripe more or less.
EDGES = [
    size + near
    for size in (16, 128, 240, 1024, 1088, 2048, 8192, 9216, 64512, 64576, CHUNK, CHUNK + 1024, 2 * CHUNK, 3 * CHUNK)
    for near in (-65, -64, -17, -16, -1, 0, 1, 16, 63, 64, 65)
    if size + near >= 0
]


def bytes_of(tensor: Tensor) -> bytes:
    stored = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return stored.view(-1).view(torch.uint8).numpy().tobytes()


def chunk_digests_of(tensor: Tensor) -> list[bytes]:
    data = bytes_of(tensor)
    return [xxhash.xxh3_128_digest(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK)]


def digests_of(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(xxhash.xxh3_128_hexdigest(b"".join(chunk_digests_of(tensor))) for tensor in tensors)


class Source:
    """Tensors with random bytes."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device, self.random = device, random.Random(seed)

    def bytes(self, size: int, offset: int = 0) -> Tensor:
        """uint8 [size] that begins `offset` bytes after a multiple of 64."""
        data = torch.frombuffer(bytearray(self.random.randbytes(size + offset + 1)), dtype=torch.uint8)
        memory = torch.empty(size + offset + 64, dtype=torch.uint8, device=self.device)
        begin = -memory.data_ptr() % 64 + offset
        memory[begin : begin + size] = data[:size].to(self.device)
        return memory[begin : begin + size]

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Begins `offset` elements after a multiple of 64 bytes."""
        numel = torch.Size(shape).numel()
        raw = self.bytes(numel * dtype.itemsize, offset * dtype.itemsize)
        return (raw % 2 if dtype == torch.bool else raw).view(dtype).view(shape)

    def list(self, count: int) -> list[Tensor]:
        """Of all dtypes and alignments: most of them short, some of several chunks, some empty."""
        shapes = [(0,), (), (3,), (7, 11), (129, 5), (300, 41), (64, 1024), (257, 515)]
        return [
            self.tensor(self.random.choice(shapes), self.random.choice(DTYPES), self.random.randrange(4))
            for _ in range(count)
        ]


@pytest.fixture
def source(device):
    return Source(device)


@pytest.fixture
def gpu_source():
    if cause := state_digest._why_not_native("cuda"):
        pytest.skip(f"needs the extension: {cause}")
    return Source(torch.device("cuda", torch.cuda.current_device()))


def native(tensors: list[Tensor]) -> list[bytes]:
    found = torch.ops.sparse_opt_native.chunk_digests(tensors)
    assert (found.dtype, found.device) == (torch.uint8, tensors[0].device)
    return [bytes(row) for row in found.cpu().numpy()]


def assert_chunks(tensors: list[Tensor]) -> None:
    assert native(tensors) == [digest for tensor in tensors for digest in chunk_digests_of(tensor)]


@pytest.mark.gpu
def test_every_length_up_to_1100(gpu_source):
    assert_chunks([gpu_source.bytes(size, size % 16) for size in range(1101)])
    assert_chunks([gpu_source.bytes(size) for size in range(1101)])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8, 13])
def test_around_every_boundary(gpu_source, offset):
    assert_chunks([gpu_source.bytes(size, offset) for size in EDGES])


# One table of a GPU's launch holds 8 tensors, or 320.
@pytest.mark.parametrize("count", [1, 8, 9, 320, 321, 700])
def test_lists(source, count):
    tensors = source.list(count)
    assert StateDigest.start(tensors).result() == digests_of(tensors)


def test_any_single_bit_shows(source):
    state = source.bytes(2 * CHUNK + 321)
    digests = {StateDigest.start([state]).result()}
    for place in [0, 239, 1023, CHUNK - 65, CHUNK - 64, CHUNK - 1, CHUNK, 2 * CHUNK + 320]:
        state[place] ^= 1 << source.random.randrange(8)
        found = StateDigest.start([state]).result()
        assert found == digests_of([state]) and found not in digests
        digests.add(found)


def test_what_is_not_contiguous_is_read_in_row_major_order(source):
    matrix = source.tensor((300, 500), torch.bfloat16)
    tensors = [matrix.T, matrix[:, 1:400:3], matrix[7:, 3:], source.tensor((65, 33), torch.complex64).conj()]
    assert StateDigest.start(tensors).result() == digests_of(tensors)


def test_cpu_tensors():
    tensors = Source(torch.device("cpu"), 1).list(60)
    tensors[3].requires_grad_(tensors[3].is_floating_point())
    tensors.append(torch.nn.Parameter(torch.randn(17, 5)))
    assert StateDigest.start(tensors).result() == digests_of(tensors)


def test_known_digests():
    # The xxHash project's own values: of nothing, and of nothing but the digest of one zero byte.
    assert StateDigest.start([torch.empty(0, 3)]).result() == ("99aa06d3014798d86001c324468d497f",)
    assert StateDigest.start([]).result() == ()
    one = bytes.fromhex("a6cd5e9392000f6ac44bdff4074eecdb")
    assert StateDigest.start([torch.zeros(1, dtype=torch.uint8)]).result() == (xxhash.xxh3_128_hexdigest(one),)


def test_later_writes_do_not_show():
    state = [torch.arange(100_000.0), torch.ones(3)]
    expected = digests_of(state)
    pending = StateDigest.start(state)
    for tensor in state:
        tensor.zero_()
    assert pending.result() == expected == pending.result()


def test_a_tensor_made_of_others_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(ValueError, match=r"tensors\[1\] is a TwoTensor, which has no bytes of its own"):
        StateDigest.start([torch.zeros(2), TwoTensor(torch.zeros(2), torch.zeros(2))])


@pytest.mark.gpu
def test_gpu_and_cpu_tensors_keep_their_order(gpu_source):
    on_gpu, on_cpu = gpu_source.list(40), Source(torch.device("cpu"), 2).list(40)
    tensors = [tensor for pair in zip(on_gpu, on_cpu, strict=True) for tensor in pair]
    assert StateDigest.start(tensors).result() == digests_of(tensors)


@pytest.mark.gpu
def test_gpu_digests_are_taken_in_the_order_of_the_stream(gpu_source):
    state = [gpu_source.tensor((1 << 20,), torch.bfloat16), gpu_source.tensor((1001,), torch.float32)]
    StateDigest.start(state).result()  # memory for both ends is there from here on
    expected = [torch.full_like(tensor, 0.5) for tensor in state]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for tensor, value in zip(state, expected, strict=True):
            tensor.copy_(value)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = StateDigest.start(state)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waited = stream.query()
        for tensor in state:
            tensor.zero_()
    with ThreadPoolExecutor(1) as other_thread:
        found = other_thread.submit(pending.result).result()
    stream.synchronize()
    assert not waited
    assert found == digests_of(expected)


@pytest.fixture
def without_extension(monkeypatch):
    monkeypatch.setattr(state_digest, "_why_not_native", lambda device_type: "switched off by a test")
    state_digest._warn_copied.cache_clear()
    yield
    state_digest._warn_copied.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("without_extension")
def test_without_the_extension_gpu_tensors_are_copied_with_one_warning():
    tensors = Source(torch.device("cuda"), 3).list(30)
    with pytest.warns(UserWarning, match="copies tensors from cuda to the host .*: switched off by a test"):
        found = StateDigest.start(tensors).result()
    assert found == digests_of(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StateDigest.start(tensors)
