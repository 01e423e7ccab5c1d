"""Sparse updates of an engine with two tensor-parallel workers, in processes of their own over gloo."""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm_lab import EXPERTS, engine, make_model
from vllm_updates import DamagedSender, Trainer, save, tokens_of

from sparse_opt.errors import WeightSyncError
from sparse_opt.integrations.vllm import VLLMWeightSync
from sparse_opt.weight_sync import WeightSender

OPTIONS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
UPDATES = 6
REFUSED, FAILED = 3, 5  # versions


def test_workers_with_slices_of_the_weights_follow_the_trainer(tmp_path, monkeypatch):
    """A mixture of experts. Another number of workers adds up in another order: tokens are compared with as many."""

    def break_second(worker):
        def fail(update_info):
            raise MemoryError("none left")

        if worker.rank == 1:
            worker.weight_transfer_engine._receive = fail

    def mend_second(worker):
        if worker.rank == 1:
            del worker.weight_transfer_engine._receive

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of the two functions
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise each worker needs a NUMA node
    kind, sizes = EXPERTS["qwen3-moe"]
    trainer = Trainer(make_model(kind, **sizes, max_position_embeddings=512))
    folder = save(tmp_path / "first", trainer.model)
    sender = WeightSender(trainer.model, trainer.mask)
    found = {}
    with engine(folder, **OPTIONS) as llm:
        sync = VLLMWeightSync(sender, llm)
        assert sync.connect() == 0
        found[0] = tokens_of(llm)
        for version in range(1, UPDATES + 1):
            trainer.step()
            if version == REFUSED:  # by both workers, which stay at the version before
                with pytest.raises(WeightSyncError, match="have digest.*all 2 workers have kept their weights"):
                    VLLMWeightSync(DamagedSender(sender), llm).update()
                assert tokens_of(llm) == found[version - 1]
                continue
            if version == FAILED:  # on the second worker alone; the next update brings both to its version
                llm.collective_rpc(break_second)
                with pytest.raises(WeightSyncError, match="none left; failed on workers 1 of 2.*may differ"):
                    sync.update()
                llm.collective_rpc(mend_second)
                continue
            assert sync.update() == version
            found[version] = tokens_of(llm)
        assert llm.get_weight_version() == str(UPDATES)
    assert all(found[a] != found[b] for a in found for b in found if a < b)
    with engine(save(tmp_path / "last", trainer.model), **OPTIONS) as fresh:
        assert tokens_of(fresh) == found[UPDATES]
