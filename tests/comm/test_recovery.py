"""Ranks go on after an error jointly, or not at all. `on_ranks/recovery.py` has claims of all
ranks."""

from pathlib import Path

import pytest
from processes import PATIENT_S, failed_outputs, on

pytestmark = pytest.mark.ranks
NOT_TOGETHER = (
    "RuntimeError: an earlier error left this rank at message 8 of its group, and not all ranks "
    "returned"
)
SLOW = pytest.mark.slow
TRIES = [
    ("mpi", "again"),
    pytest.param("gloo", "again", marks=SLOW),
    pytest.param("mpi", "new", marks=SLOW),
    pytest.param("gloo", "new", marks=SLOW),
]


@pytest.mark.parametrize("backend, how", TRIES)
def test_a_rank_that_failed_alone_inside_a_step_and_tries_again_ends_all(
    backend: str, how: str, tmp_path: Path
):
    _, last = failed_outputs(tmp_path, backend, how, "retries.py")
    assert NOT_TOGETHER in last


@on("gloo")
def test_so_does_one_while_sums_of_the_step_before_are_under_way(backend: str, tmp_path: Path):
    _, last = failed_outputs(tmp_path, backend, "before, whole", "retries.py")
    assert NOT_TOGETHER.replace("message 8", "message 3") in last


@on("gloo")
@pytest.mark.parametrize("how", ["new, swallow", pytest.param("swallow", marks=SLOW)])
def test_a_rank_that_catches_this_too_ends_all_when_it_ends(backend: str, how: str, tmp_path: Path):
    """The same holds if it tries again with a new step."""
    _, last = failed_outputs(tmp_path, backend, how, "retries.py")
    assert NOT_TOGETHER.removeprefix("RuntimeError: ") in last
    assert "all went well" in last


@on("mpi")
def test_a_rank_too_late_from_an_error_of_all_hears_that_the_others_gave_up(
    backend: str, tmp_path: Path
):
    for output in failed_outputs(tmp_path, backend, "late", "retries.py", grace_s=PATIENT_S):
        assert NOT_TOGETHER in output or "failed as the others did" in output
