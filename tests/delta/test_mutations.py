"""Three thousand broken files: each is read as the right bits or refused, in bounded memory and time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import run_script

MUTATIONS = 3_000


@pytest.mark.slow
def test_thousands_of_broken_files(tmp_path: Path) -> None:
    driver = Path(__file__).with_name("mutation_driver.py")
    done = run_script(driver, [str(tmp_path), str(MUTATIONS), "1"], timeout=300)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    assert sum(sum(kinds.values()) for kinds in outcomes.values()) == MUTATIONS
    # The damage is found; a read that does not use it is right.
    for name, kinds in outcomes.items():
        assert kinds["refused"] > 0.3 * sum(kinds.values()), name
