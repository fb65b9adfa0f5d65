"""A checkpoint does not depend on the backend: any number of replicas reads those of any other."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from processes import launch
from workers.crosswise import SHARDS, does

import fddp

pytestmark = pytest.mark.steps

PAIRS = [f"restore:{saved}:{target}" for saved in SHARDS for target in SHARDS]
SAVES = [f"save:{shard}" for shard in SHARDS]


def on_ranks(
    backend: str,
    size: int,
    folders: Sequence[Path],
    out: Path,
    *words: str,
) -> Sequence[dict[str, str]]:
    """A job's digest of each word, for each folder."""
    out.mkdir()
    paths = os.pathsep.join(map(str, folders))
    outcome = launch(backend, size, "crosswise.py", paths, *words, folder=out)
    assert outcome.succeeded
    lines = re.findall(r"^(\S+) (\S+:\S+) (\w{64})$", outcome.outputs[0], re.MULTILINE)
    return [{word: bits for name, word, bits in lines if name == folder.name} for folder in folders]


def as_saved(digests: dict[str, str], expected: dict[str, str]) -> None:
    """Each restored state has the bits of the saved one, for any shards of either."""
    assert digests == {pair: expected[f"save:{pair.split(':')[1]}"] for pair in PAIRS}


@pytest.mark.quick("3")
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_what_some_replicas_save_others_restore_in_all_shards(
    group: Callable[[int], fddp.Group], tmp_path: Path, replicas: int
):
    expected = {save: does(group(replicas), tmp_path, save) for save in SAVES}
    assert len(set(expected.values())) == 3
    for count in {1, 2, 3, 4} - {replicas}:
        as_saved({pair: does(group(count), tmp_path, pair) for pair in PAIRS}, expected)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("writers", "readers"),
    [(("mpi", 3), ("gloo", 2)), pytest.param(("gloo", 2), ("mpi", 3), marks=pytest.mark.slow)],
)
def test_what_ranks_of_a_backend_save_those_of_another_and_devices_restore(
    group: Callable[[int], fddp.Group],
    tmp_path: Path,
    writers: tuple[str, int],
    readers: tuple[str, int],
):
    saved = tmp_path / "saved"
    by_hand = tmp_path / "here"
    (by_ranks,) = on_ranks(*writers, [saved], tmp_path / "one", *SAVES)
    assert set(by_ranks) == set(SAVES)
    by_devices = {save: does(group(2), by_hand, save) for save in SAVES}
    restored = on_ranks(*readers, [saved, by_hand], tmp_path / "other", *PAIRS)
    for digests, expected in zip(restored, (by_ranks, by_devices)):
        as_saved(digests, expected)
    as_saved({pair: does(group(4), saved, pair) for pair in PAIRS}, by_ranks)
