"""`fddp.init` picks a backend by what started the processes and by what is installed, and says so."""

import os
from pathlib import Path

import pytest
from processes import PATIENT_S, TESTS, free_port, launch

pytestmark = pytest.mark.ranks


def joined(folder: Path, backend: str, *args: object, **env: str) -> list[str]:
    """The line that each rank of two prints about the group that it joined and trained in."""
    outcome = launch(backend, 2, "joins.py", *args, folder=folder, timeout_s=60, **env)
    assert outcome.succeeded
    return [text.removesuffix("\n") for text in outcome.outputs]


def test_fddps_variables_make_a_gloo_group(tmp_path: Path):
    assert joined(tmp_path, "gloo") == [f"gloo {rank} of 2, 2 replicas, 0.5" for rank in range(2)]


def test_processes_of_two_devices_are_four_replicas(tmp_path: Path):
    lines = joined(tmp_path, "gloo", JAX_NUM_CPU_DEVICES="2")
    assert lines == [f"gloo {rank} of 2, 4 replicas, 0.5" for rank in range(2)]


def test_explicit_arguments_win_over_variables(tmp_path: Path):
    assert joined(tmp_path, "gloo", "arguments", free_port()) == [
        "gloo 1 of 2, 2 replicas, 0.5",
        "gloo 0 of 2, 2 replicas, 0.5",
    ]


def test_a_jax_distributed_of_the_users_own_is_adopted(tmp_path: Path):
    assert joined(tmp_path, "gloo", "adopt") == [f"gloo {rank} of 2, 2 replicas, 0.5" for rank in range(2)]


def test_under_mpiexec_mpi_is_picked(tmp_path: Path):
    assert joined(tmp_path, "mpi") == [f"mpi {rank} of 2, 2 replicas, 0.5" for rank in range(2)]


def test_under_mpiexec_gloo_needs_no_coordinator(tmp_path: Path):
    assert joined(tmp_path, "mpi", "gloo") == [f"gloo {rank} of 2, 2 replicas, 0.5" for rank in range(2)]


def test_under_srun_gloo_is_picked_whatever_pmi_it_offers_and_rank_0_says_so(tmp_path: Path):
    said = "fddp: srun --mpi=pmi2: backend 'gloo'; fddp.init('mpi') takes MPI, if it starts there."
    first, second = joined(tmp_path, "gloo", "srun", free_port())
    assert first.splitlines() == ["gloo 0 of 2, 2 replicas, 0.5", said]
    assert second == "gloo 1 of 2, 2 replicas, 0.5"


def test_where_mpi_knows_fewer_ranks_those_who_know_their_coordinator_take_gloo(tmp_path: Path):
    first, second = joined(tmp_path, "gloo", "other mpi")
    assert first.splitlines() == [
        "gloo 0 of 2, 2 replicas, 0.5",
        "fddp: Open MPI says 2 ranks, MPI 1: backend 'gloo'.",
    ]
    assert second == "gloo 1 of 2, 2 replicas, 0.5"


def test_mpi_on_several_devices_is_an_error(tmp_path: Path):
    outcome = launch("mpi", 2, "joins.py", "mpi", folder=tmp_path, timeout_s=30, JAX_NUM_CPU_DEVICES="2")
    assert outcome.ended
    assert not outcome.succeeded
    assert "backend 'mpi' drives one device a process, and this one has 2" in outcome.outputs[0]


@pytest.mark.parametrize(
    ("mpi4jax", "why"),
    [
        (
            "raise RuntimeError('MPI ABI incompatibility detected!\\n - built with')",
            "MPI ABI incompatibility detected!",
        ),
        # One that was built with a newer jaxlib loads, and JAX refuses it when it starts.
        ("import jax\ndef refuse(): raise RuntimeError('API version')\njax.local_devices = refuse", "API version"),
    ],
)
def test_an_mpi4jax_that_does_not_fit_is_told_in_full_once_and_names_the_doctor(tmp_path: Path, mpi4jax: str, why: str):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "mpi4jax.py").write_text(mpi4jax)
    path = os.pathsep.join(map(str, (packages, TESTS.parent, TESTS)))
    outcome = launch("mpi", 2, "joins.py", folder=tmp_path, timeout_s=60, PYTHONPATH=path, FDDP_GRACE_S=PATIENT_S)
    assert outcome.ended and not outcome.succeeded
    first, second = outcome.outputs
    told = (
        f"RuntimeError: backend 'mpi': mpi4jax does not go with mpi4py's MPI and this jaxlib ({why}); "
        "`python -m fddp doctor` names the command that mends it, or use backend 'gloo'.\n"
    )
    assert first.count("Traceback") == 1 and first.endswith(told)
    assert second == f"fddp: rank 1 of 2 failed as the others did: {told}"
