"""An error of one rank ends all, and is printed once.

`test_watcher.py` has ranks that die, leave or are stuck.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import JOBS, PATIENT_S, case, failed_outputs, on

pytestmark = pytest.mark.ranks
# The job and the rank that fails. Over Gloo rank 0 has the coordination service.
QUICK = [(("mpi", 3), 2), (("gloo", 2), 0)]
ALL = [(job, failing) for job in JOBS for failing in (0, job[1] - 1)]
FAILING = [case(*failure, slow=failure not in QUICK) for failure in ALL]


@pytest.mark.parametrize("backend, size, failing", FAILING)
def test_an_error_on_one_rank_ends_all_and_is_shown(
    backend: str,
    size: int,
    failing: int,
    tmp_path: Path,
):
    outputs = failed_outputs(tmp_path, backend, f"raise:{failing}", size=size)
    assert f"fddp: rank {failing} of {size} failed:\nTraceback" in outputs[failing]
    assert f"RuntimeError: rank {failing} has had enough" in outputs[failing]
    other_outputs = "".join(text for rank, text in enumerate(outputs) if rank != failing)
    assert "Traceback" not in other_outputs, "the others' errors only follow from it"


# On MPI `test_init` has an error of all ranks.
@on("gloo")
def test_an_error_of_all_ranks_ends_each_and_is_told_in_full_once(backend: str, tmp_path: Path):
    first, last = failed_outputs(tmp_path, backend, "differ", grace_s=PATIENT_S)
    assert first.count("Traceback") == 1
    assert last.startswith("fddp: rank 1 of 2 failed as the others did: ValueError: ranks differ")
    for text in (first, last):
        assert "float32[1]" in text
        assert "float32[2]" in text


@on("gloo")
def test_a_keyboards_interrupt_of_all_ranks_is_one_line(backend: str, tmp_path: Path):
    assert failed_outputs(tmp_path, backend, "interrupted_all", grace_s=PATIENT_S) == (
        "fddp: rank 0 of 2 was interrupted.\n",
        "",
    )


@on("mpi")
def test_a_keyboards_interrupt_of_one_rank_ends_all_without_a_traceback(
    backend: str, tmp_path: Path
):
    outputs = failed_outputs(tmp_path, backend, "interrupted")
    assert outputs[1].startswith("fddp: rank 1 of 2 was interrupted.\n")
    assert "Traceback" not in "".join(outputs)


def test_an_error_ends_the_world_though_nothing_takes_the_output():
    script = (
        "import os, sys\n"
        "from fddp.comm import Journal\n"
        "from fddp.runtime.watching import end_together\n"
        "end_together(0, 2, Journal(), lambda _: False, lambda: os._exit(7))\n"
        "sys.stdout.write('progress')\n"
        "raise RuntimeError('on purpose')"
    )
    env = os.environ | {"FDDP_GRACE_S": "0", "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        outcome = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, env=env, timeout=60
        )
    assert outcome.returncode == 7 and b"RuntimeError: on purpose" in outcome.stderr


def test_an_error_without_a_text_ends_the_world_too():
    script = (
        "import os\n"
        "from fddp.comm import Journal\n"
        "from fddp.runtime.watching import end_together\n"
        "end_together(0, 2, Journal(), lambda _: False, lambda: os._exit(7), print)\n"
        "class Odd(Exception):\n"
        "    def __str__(self): return self.text\n"
        "raise Odd"
    )
    env = os.environ | {"FDDP_GRACE_S": "0", "PYTHONUNBUFFERED": "1"}
    outcome = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=env, timeout=60
    )
    assert outcome.returncode == 7 and outcome.stderr.startswith("fddp: rank 0 of 2 failed:\nTrace")
    assert outcome.stdout == "rank 0: Odd: its text cannot be made (AttributeError in __str__)\n"
