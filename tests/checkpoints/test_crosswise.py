"""A checkpoint is one and the same on every backend: any number of replicas reads what any other has written."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import launch
from workers.crosswise import SHARDS, does

import fddp

pytestmark = pytest.mark.steps

PAIRS = [f"restore:{saved}:{wanted}" for saved in SHARDS for wanted in SHARDS]
SAVES = [f"save:{shard}" for shard in SHARDS]


def on_ranks(backend: str, size: int, folder: Path, out: Path, *words: str) -> dict[str, str]:
    """What a job finds for each word."""
    out.mkdir()
    outcome = launch(backend, size, "crosswise.py", folder, *words, folder=out, timeout_s=300)
    assert outcome.succeeded
    return dict(re.findall(r"^(\S+:\S+) (\w{64})$", outcome.outputs[0], re.MULTILINE))


def as_saved(found: dict[str, str], expected: dict[str, str]) -> None:
    """Each restored state has the bits of the saved one, in whatever shards either was."""
    assert found == {pair: expected[f"save:{pair.split(':')[1]}"] for pair in PAIRS}


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_what_some_replicas_save_others_restore_in_all_shards(
    group: Callable[[int], fddp.Group], tmp_path: Path, replicas: int
):
    expected = {save: does(group(replicas), tmp_path, save) for save in SAVES}
    assert len(set(expected.values())) == 3
    for others in {1, 2, 3, 4} - {replicas}:
        as_saved({pair: does(group(others), tmp_path, pair) for pair in PAIRS}, expected)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("one", "other"),
    [(("mpi", 3), ("gloo", 2)), pytest.param(("gloo", 2), ("mpi", 3), marks=pytest.mark.slow)],
)
def test_what_ranks_of_a_backend_save_those_of_another_and_devices_restore(
    group: Callable[[int], fddp.Group], tmp_path: Path, one: tuple[str, int], other: tuple[str, int]
):
    expected = on_ranks(*one, tmp_path / "saved", tmp_path / "one", *SAVES)
    assert set(expected) == set(SAVES)
    as_saved(on_ranks(*other, tmp_path / "saved", tmp_path / "other", *PAIRS), expected)
    as_saved({pair: does(group(4), tmp_path / "saved", pair) for pair in PAIRS}, expected)
    here = {save: does(group(2), tmp_path / "here", save) for save in SAVES}
    as_saved(on_ranks(*other, tmp_path / "here", tmp_path / "back", *PAIRS), here)
