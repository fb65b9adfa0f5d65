"""An error inside a step ends the job, also if a script catches it."""

from pathlib import Path

import pytest
from processes import failed_outputs

pytestmark = pytest.mark.ranks
BROKEN = "an earlier error inside a step left this rank at another message"
SLOW = pytest.mark.slow
TRIES = [
    ("mpi", "again"),
    pytest.param("gloo", "again", marks=SLOW),
    pytest.param("mpi", "new", marks=SLOW),
    pytest.param("gloo", "new", marks=SLOW),
]


@pytest.mark.parametrize("backend, how", TRIES)
def test_a_rank_that_failed_inside_a_step_and_tries_again_ends_all(
    backend: str, how: str, tmp_path: Path
):
    _, last = failed_outputs(tmp_path, backend, how, "retries.py")
    assert BROKEN in last
