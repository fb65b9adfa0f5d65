"""A training in shards, in a rehearsal of the one that no rank's memory could hold:
`bench/beyond_memory.py`."""

import pytest
from processes import on

from bench import beyond_memory

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
]  # `on_ranks/` holds the parts of it: made, saved, restored


@on("gloo")
def test_new_processes_go_on_with_the_bits_that_were_saved(backend: str):
    reports = beyond_memory.run_jobs(backend, 2, "small")
    assert reports["restored"]["losses"] == reports["trained"]["losses"][beyond_memory.STEPS :]
    assert reports["restored"]["bits"] == reports["trained"]["bits"]
