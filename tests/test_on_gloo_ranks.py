"""Claims that every rank of a job over Gloo asserts for itself, in `on_ranks/`: each becomes a test of its name."""

import pytest
from on_ranks.job import Jobs, claims_of, jobs_of

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(request, tmp_path_factory)


@jobs_of("gloo")
def test_a_job_without_errors_ends_well_and_prints_nothing(backend: str, size: int, jobs: Jobs):
    jobs.prints_nothing(backend, size)


@claims_of("gloo")
def test_on_every_rank(backend: str, size: int, claim: str, jobs: Jobs):
    jobs.holds(backend, size, claim)
