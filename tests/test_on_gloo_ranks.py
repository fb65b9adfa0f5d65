"""Claims that every rank of a job over Gloo asserts for itself, in `on_ranks/`: each becomes a test
of its name."""

from on_ranks.job import (  # noqa: F401
    pytest_generate_tests,
    reports,
    test_a_job_without_errors_ends_well_and_prints_nothing,
    test_on_every_rank,
)

BACKEND = "gloo"
