"""`fddp.init` on real ranks that have MPI or `jax.distributed` already, or an unfit mpi4jax.

`test_launchers.py` claims which backend it picks by variables and arguments. `on_ranks/group.py`
claims that ranks of mpiexec take MPI, and ranks of the `FDDP_*` variables Gloo.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENT_S, TESTS, launch

pytestmark = pytest.mark.ranks
# Of two ranks that have joined over Gloo and trained a step.
GLOO = tuple(f"gloo {rank} of 2, 2 replicas, 0.5\n" for rank in range(2))


def test_a_jax_distributed_of_the_users_own_is_adopted(tmp_path: Path):
    outcome = launch("gloo", 2, "doors.py", "adopt", folder=tmp_path)
    assert outcome.succeeded and outcome.outputs == GLOO


def test_under_mpiexec_gloo_needs_no_coordinator(tmp_path: Path):
    outcome = launch("mpi", 2, "doors.py", "join", "gloo", folder=tmp_path)
    assert outcome.succeeded and outcome.outputs == GLOO


# `test_mpi_vendors` has the error of each misfit, without a job.
def test_an_mpi4jax_that_does_not_fit_is_told_in_full_once_and_names_the_doctor(tmp_path: Path):
    packages = tmp_path / "packages"
    packages.mkdir()
    reason = "MPI ABI incompatibility detected!"
    (packages / "mpi4jax.py").write_text(f"raise RuntimeError('{reason}\\n - built with')")
    path = os.pathsep.join(map(str, (packages, TESTS.parent, TESTS)))
    env: Any = {"PYTHONPATH": path, "FDDP_GRACE_S": PATIENT_S}
    outcome = launch("mpi", 2, "doors.py", "join", folder=tmp_path, **env)
    assert outcome.ended and not outcome.succeeded
    first, second = outcome.outputs
    error = (
        f"RuntimeError: backend 'mpi': mpi4jax does not work with mpi4py's MPI and this jaxlib "
        f"({reason}); "
        "`python -m fddp doctor` prints the command that repairs it, or use backend 'gloo'.\n"
    )
    assert first.count("Traceback") == 1 and first.endswith(error)
    assert second == f"fddp: rank 1 of 2 failed as the others did: {error}"
