"""`python -m fddp`, as a newcomer meets it."""

import os
import shutil
import socket
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from processes import FAULTY

from fddp.__main__ import main
from fddp.analysis.doctor import distinct
from fddp.runtime import mpi_vendors

pytestmark = pytest.mark.steps

ROOT = Path(__file__).parents[1]
loaded = cache(mpi_vendors.loaded)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def mpi_is_loaded_once(monkeypatch):
    """Doctor starts a process that loads MPI; `test_mpi_vendors` tests its output."""
    monkeypatch.setattr(mpi_vendors, "loaded", loaded)


def one_device() -> dict[str, str]:
    """The environment of a shell: one device."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }


def test_where_calls_of_one_program_differ_doctor_says_so(capsys, monkeypatch):
    """XLA:CPU with several threads may differ in this way."""
    calls = count()
    assert distinct(lambda x: x + next(calls) // 25, np.zeros(2)) == 2
    monkeypatch.setattr("fddp.analysis.doctor.distinct", lambda *args: 2)
    assert main(["doctor"]) == 0
    assert "virtual_replicas cannot promise equal bits here" in capsys.readouterr().out


def test_doctor_names_what_is_here(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for words in (
        f"jax                     {jax.__version__}",
        "8 × cpu",
        "backend mpi",
        "messages between CPUs",
        "rank 0 of 1",
    ):
        assert words in printed


LIMIT = "jax_persistent_cache_min_compile_time_secs"


def test_doctor_prints_folder_and_limit_of_the_compilation_cache(capsys):
    assert main(["doctor"]) == 0
    limit = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    assert (
        f"{jax.config.values['jax_compilation_cache_dir']}, of programs that take {limit:g} s"
        in capsys.readouterr().out
    )


def test_doctor_tells_the_rest_where_a_look_fails(capsys, monkeypatch):
    monkeypatch.setenv("FDDP_RANK", "0")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "FDDP_RANK given but not FDDP_SIZE" in printed and "backend mpi" in printed


@pytest.mark.parametrize(
    ("env", "expected_words"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"},
            [
                "rank 1 of 2, by torchrun's variables",
                "RANK=1 WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500",
                "node1:6",
            ],
        ),
        (
            {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"},
            ["rank 0 of 2, by Flux", "set FDDP_COORDINATOR=host:port"],
        ),
        (
            {"JOB_COMPLETION_INDEX": "1"},
            ["rank 0 of 1, by alone", "JOB_COMPLETION_INDEX=1 comes from an Indexed Job"],
        ),
    ],
    ids=lambda case: next(iter(case)),
)
def test_doctor_tells_which_launcher_and_variables_it_read_and_where_rank_0_is_met(
    env, expected_words, capsys, monkeypatch
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert [words for words in expected_words if words not in printed] == []


def test_doctor_names_the_cores_that_ranks_of_mpich_may_have_for_themselves(capsys, monkeypatch):
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    for name, value in hydra.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for usable, advice in ((8, True), (4, False)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=usable: set(range(n)))
        assert main(["doctor"]) == 0
        assert ("mpiexec -bind-to hwthread:4 gives each rank" in capsys.readouterr().out) == advice


def test_inside_a_slurm_job_doctor_speaks_of_srun(tmp_path, monkeypatch, capsys):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    job = {"SLURM_JOB_ID": "8", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    hint = "Slurm gave this job 2 tasks, but this is one process: start it with srun."
    assert f"{'':<22}  → {hint}" in lines
    assert f"{'launcher':<22}  {srun}" in lines


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fddp {version('fddp')}\n"


def test_the_command_starts_quietly_and_explains_itself(capsys):
    env = {name: value for name, value in one_device().items() if name != "JAX_PLATFORMS"}
    words = [sys.executable, "-m", "fddp", "doctor"]
    run = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stderr == "" and run.stdout.startswith("Python")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.startswith("usage: python -m fddp")


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["run", "-n", "2"]])
def test_help_and_wrong_options_load_no_analysis(words):
    script = (
        "import runpy, sys\n"
        "try: runpy.run_module('fddp', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([x for x in ('fddp.analysis', 'flax', 'matplotlib') if x in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"


def test_jax_used_before_init_starts_quietly():
    env = {name: value for name, value in one_device().items() if name != "JAX_PLATFORMS"}
    for words in ("import fddp, jax", "import jax, fddp"):
        script = f"{words}; jax.numpy.ones(2); fddp.init(); print(jax.default_backend())"
        run = subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        quiet = [line for line in run.stderr.splitlines() if not FAULTY.match(line)]
        assert quiet == []


def test_doctor_names_an_mpiexec_that_is_not_mpi4pys(tmp_path, monkeypatch, capsys):
    plain = tmp_path / "mpiexec"
    plain.write_text("#!/bin/sh\necho 'mpiexec (OpenRTE) 4.1.4'\n")
    plain.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    local = Path(sys.executable).with_name("mpiexec")
    hint = (
        f"{'launcher':<22}  {local}\n{'':<22}  → mpi4py has MPICH; plain mpiexec is {plain}, "
        f"of Open MPI\n"
    )
    assert hint in printed
    assert f"{'backend mpi':<22}  ready: MPICH\n" in printed


def test_a_terminal_that_knows_ascii_alone_gets_every_line():
    for words in (["doctor"], ["run", "--help"]):
        completed = subprocess.run(
            [sys.executable, "-m", "fddp", *words],
            env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
            capture_output=True,
            timeout=300,
        )
        assert completed.returncode == 0, completed.stderr
        assert b"\\u" in completed.stdout


def test_doctor_names_a_host_and_a_shared_memory_that_will_not_do(monkeypatch, capsys):
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=4096))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("fddp.analysis.doctor.installed", lambda _: "0.10.2")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert (
        "wrong numbers: sums of vmapped" in printed and "→ jaxlib 0.11.0 or XLA_FLAGS=" in printed
    )
    assert "the name 'nowhere.invalid' of this host does not lead to an address" in printed
    assert "ready: CPUs of several processes, past https_proxy" in printed
    assert "/dev/shm has 0.00391 MiB, and MPICH may crash" in printed
