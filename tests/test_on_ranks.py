"""Processes that train together: what they say to each other, how they differ, and how they end.

Each rank of a job asserts the claims in `on_ranks/` for itself; here every claim becomes a test.
"""

import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from on_ranks.claims import HELD
from on_ranks.hold import claimed
from processes import HOLD, JOBS, TESTS, Outcome, case, free_port, launch, selected

on_every_job = pytest.mark.parametrize("backend, size", [case(job) for job in JOBS])
on_two_ranks = pytest.mark.parametrize("backend", ["mpi", "gloo"])


def on(quick: str) -> pytest.MarkDecorator:
    """One backend by default, the other one in the tier `slow`."""
    marked = [pytest.param(one, marks=[] if one == quick else [pytest.mark.slow]) for one in ("mpi", "gloo")]
    return pytest.mark.parametrize("backend", marked)


pytestmark = pytest.mark.ranks
# Where all ranks fail nobody waits this long, however busy the machine is.
PATIENT_S = "10"

### What holds while they run

Reports = Callable[[str, int], tuple[Outcome, list[dict[str, str]]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Reports:
    """`reports(backend, size)`: what every rank found of each selected claim; started once for all."""

    @cache
    def job(backend: str, size: int) -> tuple[Outcome, list[dict[str, str]]]:
        folder = tmp_path_factory.mktemp(f"{backend}-{size}")
        names = selected(request, backend, size, "claim")
        outcome = launch(backend, size, HOLD, folder, *names, folder=folder, timeout_s=480)
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


### How they meet


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


### How they end


def ended(
    folder: Path, backend: str, how: str, script: str = "ends.py", size: int = 2, grace_s: str = "1"
) -> tuple[str, ...]:
    """What each rank shows of a script that ends badly; no process may go on, and none may end as if all were well."""
    outcome = launch(backend, size, script, how, folder=folder, timeout_s=30, FDDP_GRACE_S=grace_s)
    assert outcome.ended
    assert 0 not in outcome.codes
    return outcome.outputs


@on_every_job
def test_an_error_on_one_rank_ends_all_and_is_shown(backend: str, size: int, tmp_path: Path):
    *others, last = ended(tmp_path, backend, "raise", size=size)
    assert f"fddp: rank {size - 1} of {size} failed:\nTraceback" in last
    assert f"RuntimeError: rank {size - 1} has had enough" in last
    assert "Traceback" not in "".join(others), "the others' errors only follow from it"


@on("gloo")
def test_an_error_on_rank_0_ends_all_and_is_shown(backend: str, tmp_path: Path):
    first, _ = ended(tmp_path, backend, "raise_on_rank_0")
    assert "RuntimeError: rank 0 has had enough" in first


@on_two_ranks
def test_an_error_of_all_ranks_ends_each_and_is_told_in_full_once(backend: str, tmp_path: Path):
    first, last = ended(tmp_path, backend, "differ", grace_s=PATIENT_S)
    assert first.count("Traceback") == 1
    assert last.startswith("fddp: rank 1 of 2 failed as the others did: ValueError: ranks differ")
    for text in (first, last):
        assert "float32[1]" in text
        assert "float32[2]" in text


@on("mpi")
def test_sys_exit_on_one_rank_ends_all(backend: str, tmp_path: Path):
    ended(tmp_path, backend, "exit")


@on("mpi")
def test_a_killed_rank_ends_all(backend: str, tmp_path: Path):
    ended(tmp_path, backend, "killed")


@on("gloo")
def test_a_keyboards_interrupt_of_all_ranks_is_one_line(backend: str, tmp_path: Path):
    assert ended(tmp_path, backend, "interrupted_all", grace_s=PATIENT_S) == (
        "fddp: rank 0 of 2 was interrupted.\n",
        "",
    )


@on("mpi")
def test_a_keyboards_interrupt_of_one_rank_ends_all_without_a_traceback(backend: str, tmp_path: Path):
    outputs = ended(tmp_path, backend, "interrupted")
    assert outputs[1].startswith("fddp: rank 1 of 2 was interrupted.\n")
    assert "Traceback" not in "".join(outputs)


### How they go on after an error


NOT_TOGETHER = "RuntimeError: an earlier error left this rank at message 8 of its group, and not all ranks came back"


SLOW = pytest.mark.slow
TRIES = [
    ("mpi", "again"),
    ("gloo", "new"),
    *(pytest.param(*one, marks=SLOW) for one in (("gloo", "again"), ("mpi", "new"))),
]


@pytest.mark.parametrize("backend, how", TRIES)
def test_a_rank_that_failed_alone_inside_a_step_and_tries_again_ends_all(backend: str, how: str, tmp_path: Path):
    _, last = ended(tmp_path, backend, how, "retries.py")
    assert NOT_TOGETHER in last


@on("mpi")
def test_a_rank_that_failed_alone_before_an_eager_step_s_first_message_and_tries_again_ends_all(
    backend: str, tmp_path: Path
):
    """The others have used up what was gathered for this step."""
    _, last = ended(tmp_path, backend, "before", "retries.py")
    assert NOT_TOGETHER.replace("message 8", "message 11") in last


@on("mpi")
def test_so_does_one_before_its_first_message_while_sums_of_the_step_before_are_under_way(backend: str, tmp_path: Path):
    _, last = ended(tmp_path, backend, "before, whole", "retries.py")
    assert NOT_TOGETHER.replace("message 8", "message 3") in last


@on("gloo")
def test_a_rank_that_catches_this_too_ends_all_when_it_ends(backend: str, tmp_path: Path):
    _, last = ended(tmp_path, backend, "swallow", "retries.py")
    assert "all went well" in last


@on("mpi")
def test_a_rank_that_comes_too_late_from_an_error_of_all_hears_that_the_others_gave_up(backend: str, tmp_path: Path):
    for output in ended(tmp_path, backend, "late", "retries.py", grace_s=PATIENT_S):
        assert NOT_TOGETHER in output or "failed as the others did" in output
