"""The options that say how several processes share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparse_opt.config import parse_config
from sparse_opt.errors import ConfigError
from sparse_opt.trainers.dpo import DPOConfig
from sparse_opt.trainers.ranks import Ranks
from sparse_opt.trainers.rlt import RLTConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "configs" / "dpo_fsdp.yaml"


def parse(*words, config=DPOConfig):
    return parse_config(config, ["policy_name=m", "dataset=d", *words])


def test_fsdp_is_another_name_of_parallel_fsdp():
    for words in (["--fsdp"], ["fsdp=true"], ["--parallel=fsdp"]):
        assert parse(*words).parallel == "fsdp"
    assert parse("--no-fsdp").parallel == "auto"
    assert parse("fsdp=false", "parallel=replicate").parallel == "replicate"
    with pytest.raises(ConfigError, match="options 'fsdp' and 'parallel' exclude each other: give one"):
        parse("--fsdp", "--parallel=none")
    with pytest.raises(ConfigError, match=r"option 'fsdp' is false, and parallel is fsdp: give one"):
        parse("--no-fsdp", "--parallel=fsdp")
    with pytest.raises(ConfigError, match=r"option 'fsdp' is true, and parallel is none: give one"):
        DPOConfig(policy_name="m", dataset="d", fsdp=True, parallel="none")


def test_rlt_cannot_shard_models_and_move_them():
    templates = EXAMPLE.parent / "rlt.yaml"
    with pytest.raises(ConfigError, match="'offload_untrained_models' moves whole models, and parallel fsdp shards"):
        parse_config(RLTConfig, ["--config", str(templates), "--fsdp", "--offload_untrained_models"])


def test_trl_name_of_gather_for_generation():
    assert parse().gather_for_generation
    assert not parse("ds3_gather_for_generation=false").gather_for_generation


@pytest.mark.parametrize("n_rows", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_ranks_with_shards_make_equally_many_passes_over_all_rows(n_rows, size, n_ranks):
    passes = [Ranks(rank, n_ranks, sharded=True).passes(10, 10 + n_rows, size) for rank in range(n_ranks)]
    assert len({len(of_rank) for of_rank in passes}) == 1
    rows = [range(20)[each] for of_rank in passes for each in of_rank]
    assert [row for each in rows for row in each] == list(range(10, 10 + n_rows))
    assert max(map(len, rows), default=0) <= size
    most = max(len(Ranks(rank, n_ranks).passes(10, 10 + n_rows, size)) for rank in range(n_ranks))
    assert len(passes[0]) == most  # no more than replicated ranks need
