"""Claims that every rank of a job asserts for itself, in `on_ranks/`: each becomes a test of its name.

One job of each kind holds all that are asked for, so that its processes start once.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from on_ranks.claims import HELD
from on_ranks.hold import claimed
from processes import HOLD, JOBS, Outcome, case, launch, selected

on_every_job = pytest.mark.parametrize("backend, size", [case(job) for job in JOBS])
pytestmark = pytest.mark.ranks

Reports = Callable[[str, int], tuple[Outcome, list[dict[str, str]]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Reports:
    """`reports(backend, size)`: what every rank found of each selected claim; started once for all."""

    @cache
    def job(backend: str, size: int) -> tuple[Outcome, list[dict[str, str]]]:
        folder = tmp_path_factory.mktemp(f"{backend}-{size}")
        names = selected(request, backend, size, "claim")
        outcome = launch(backend, size, HOLD, folder, *names, folder=folder, timeout_s=900)
        return outcome, [read(folder / f"{rank}.json") for rank in range(size)]

    return job


def read(path: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


@on_every_job
def test_a_job_without_errors_ends_well_and_prints_nothing(backend: str, size: int, reports: Reports):
    outcome, _ = reports(backend, size)
    assert outcome.succeeded
    # Some claims are checked by one rank alone, which the others wait for, and in some all ranks bring the same rows.
    slow = re.compile(r"fddp: (rank \d of \d: rank \d is slow: |compiling |ranks [\d, ]+ bring the same ).*\n")
    assert [slow.sub("", output) for output in outcome.outputs] == [""] * size


@pytest.mark.parametrize(
    "backend, size, claim",
    [case(job, name, slow=job[0] not in one.quick) for job in JOBS for name, one in claimed(*job).items()],
)
def test_on_every_rank(backend: str, size: int, claim: str, reports: Reports):
    _, ranks = reports(backend, size)
    found = {rank: report.get(claim, "not reached") for rank, report in enumerate(ranks)}
    broken = {rank: text for rank, text in found.items() if text != HELD}
    assert not broken, "\n".join(f"rank {rank}: {text}" for rank, text in broken.items())
