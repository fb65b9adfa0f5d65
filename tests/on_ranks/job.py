"""The tests of claims on ranks, which a module takes for its backend: it sets `BACKEND` and imports
all four names.

One job of each kind holds all claims that are selected, so that its processes start once.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from on_ranks.claims import HELD
from on_ranks.hold import claimed
from processes import HOLD, JOBS, Outcome, case, launch, selected

Reports = Callable[[str, int], tuple[Outcome, list[dict[str, str]]]]


def test_a_job_without_errors_ends_well_and_prints_nothing(
    backend: str, size: int, reports: Reports
):
    outcome, _ = reports(backend, size)
    assert outcome.succeeded
    # In some claims all ranks have the same rows, or programs of their own.
    remark = re.compile(r"fddp: (compiling |ranks [\d, ]+ pass the same |the losses of ranks ).*\n")
    assert [remark.sub("", output) for output in outcome.outputs] == [""] * size


def test_on_every_rank(backend: str, size: int, claim: str, reports: Reports):
    _, ranks = reports(backend, size)
    results = {rank: report.get(claim, "not reached") for rank, report in enumerate(ranks)}
    broken = {rank: text for rank, text in results.items() if text != HELD}
    assert not broken, "\n".join(f"rank {rank}: {text}" for rank, text in broken.items())


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Reports:
    """`reports(backend, size)`: the result of each selected claim on every rank; the job runs
    once."""

    @cache
    def job(backend: str, size: int) -> tuple[Outcome, list[dict[str, str]]]:
        folder = tmp_path_factory.mktemp(f"{backend}-{size}")
        names = selected(request, backend, size, "claim")
        outcome = launch(backend, size, HOLD, folder, *names, folder=folder, timeout_s=3000)
        return outcome, [_read(folder / f"{rank}.json") for rank in range(size)]

    return job


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes a module's tests by the jobs of its backend, and by their claims."""
    module: Any = metafunc.module
    jobs = [job for job in JOBS if job[0] == module.BACKEND]
    if "claim" in metafunc.fixturenames:
        cases = [
            case(job, name, slow=job[0] not in claim.quick)
            for job in jobs
            for name, claim in claimed(*job).items()
        ]
        metafunc.parametrize("backend, size, claim", cases)
    else:
        metafunc.parametrize("backend, size", [case(job) for job in jobs])


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: result for name, result, _ in map(json.loads, lines)}
