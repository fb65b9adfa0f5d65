"""Jobs that hold claims: one of each kind holds all that are selected, so that its processes start once."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from on_ranks.claims import HELD
from on_ranks.hold import claimed
from processes import HOLD, JOBS, Outcome, case, launch, selected


class Jobs:
    """The jobs of a session, each started when its first claim is read."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        self.request = request
        self.folders = folders
        self.run = cache(self._run)

    def _run(self, backend: str, size: int) -> tuple[Outcome, list[dict[str, str]]]:
        folder = self.folders.mktemp(f"{backend}-{size}")
        names = selected(self.request, backend, size, "claim")
        outcome = launch(backend, size, HOLD, folder, *names, folder=folder, timeout_s=3000)
        return outcome, [_read(folder / f"{rank}.json") for rank in range(size)]

    def prints_nothing(self, backend: str, size: int) -> None:
        outcome, _ = self.run(backend, size)
        assert outcome.succeeded
        # Some claims are checked by one rank alone while the others wait. In some, all ranks have the same rows.
        slow = re.compile(r"fddp: (rank \d of \d: rank \d is slow: |compiling |ranks [\d, ]+ bring the same ).*\n")
        assert [slow.sub("", output) for output in outcome.outputs] == [""] * size

    def holds(self, backend: str, size: int, claim: str) -> None:
        _, ranks = self.run(backend, size)
        found = {rank: report.get(claim, "not reached") for rank, report in enumerate(ranks)}
        broken = {rank: text for rank, text in found.items() if text != HELD}
        assert not broken, "\n".join(f"rank {rank}: {text}" for rank, text in broken.items())


def jobs_of(backend: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the jobs of a backend."""
    return pytest.mark.parametrize("backend, size", [case(job) for job in JOBS if job[0] == backend])


def claims_of(backend: str) -> pytest.MarkDecorator:
    """Parametrizes a test by the claims of each job of a backend."""
    return pytest.mark.parametrize(
        "backend, size, claim",
        [
            case(job, name, slow=backend not in claim.quick)
            for job in JOBS
            if job[0] == backend
            for name, claim in claimed(*job).items()
        ],
    )


def _read(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: result for name, result, _ in map(json.loads, lines)}
