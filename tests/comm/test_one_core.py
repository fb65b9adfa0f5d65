"""All ranks share one core: the wait for a message and the next computation have one thread."""

import json
from pathlib import Path

import pytest
from on_ranks.claims import HELD
from processes import launch, on

pytestmark = pytest.mark.ranks
NAMES = (
    "steps_with_sums_in_flight_train_as_by_plain_jax",
    "two_steps_and_an_evaluation_in_flight_at_once_have_the_bits_of_each_alone",
)


@on("gloo")
def test_steps_on_one_core_train_as_on_several(backend: str, tmp_path: Path):
    assert launch(backend, 2, "one_core.py", tmp_path, *NAMES, folder=tmp_path).succeeded
    for rank in range(2):
        lines = (tmp_path / f"{rank}.json").read_text().splitlines()
        assert [json.loads(line)[:2] for line in lines] == [[name, HELD] for name in NAMES]
