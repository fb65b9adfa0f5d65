"""`python -m fddp`, as a newcomer meets it."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from itertools import count
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import fddp
from fddp.__main__ import main
from fddp.analysis.reproduction import distinct
from fddp.analysis.workload import find_workload
from fddp.runtime import mpi_vendors
from models import resnet

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


def test_plan_prints_the_plan_that_a_step_settles_on(group, capsys):
    assert (
        main(
            ["plan", "models.resnet:tiny", "--bucket-cap-mb", "0.01", "--first-bucket-mb", "0.005"]
        )
        == 0
    )
    model = resnet.PRESETS["tiny"]
    batch = resnet.batch(model, 8)
    params, model_state = resnet.init(model, jax.random.key(0), batch)
    step = fddp.train_step(
        resnet.loss_fn(model),
        optax.sgd(0.1),
        group=group(1),
        has_aux=True,
        bucket_cap_mb=0.01,
        first_bucket_mb=0.005,
    )
    step(step.init(params, model_state=model_state), batch)
    assert capsys.readouterr().out.strip() == str(step.plan)


@pytest.mark.aot
def test_audit_prints_a_table_and_draws_a_picture(capsys, tmp_path):
    picture = tmp_path / "schedule.png"
    words = [
        "audit",
        "models.gpt:tiny",
        "--target",
        "h100:8",
        "--bucket-cap-mb",
        "0.02",
        "--rows",
        "4",
    ]
    status = main([*words, "--picture", str(picture)])
    printed = capsys.readouterr().out
    assert "bucket 0" in printed and "h100:8: " in printed
    # Problems decide the exit status, so that a script or CI can rely on it.
    assert status == (1 if "problem: " in printed else 0)
    assert picture.stat().st_size > 0


def test_measure_prints_a_table_and_writes_a_trace(capsys, tmp_path):
    trace = tmp_path / "steps.json"
    assert main(["measure", "models.mlp:tiny", "--steps", "3", "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    head, steps, *_ = printed.splitlines()
    assert head == "models.mlp:tiny, 8 rows per replica, optax.adamw(1e-3)"
    assert steps.startswith("3 steps") and "overlap" in printed and "all-reduces" in printed
    assert json.loads(trace.read_text())


def test_tune_prints_a_prediction_for_each_cap_and_what_the_best_took():
    words = [sys.executable, "-m", "fddp", "tune", "models.mlp:tiny", "--caps", "0", "25"]
    run = subprocess.run(
        words, cwd=ROOT, env=one_device(), capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("models.mlp:tiny, 8 rows per replica, optax.adamw(1e-3)\n")
    assert "an all-reduce takes" in run.stdout and run.stdout.count("best\n") == 1
    assert re.search(r"the best staged step takes [\d.]+ ms, predicted", run.stdout)
    assert re.search(r"\nschedule='\w+', bucket_cap_mb=[\d.]+\n$", run.stdout)


@pytest.mark.aot
def test_tune_prints_an_estimate_for_each_schedule_and_cap_on_a_target(capsys):
    assert main(["tune", "models.mlp:tiny", "--target", "h100:2", "--rows", "4"]) == 0
    model, title, head, *rows, best = capsys.readouterr().out.splitlines()
    assert model == "models.mlp:tiny, 4 rows per replica, optax.adamw(1e-3)"
    assert title == "h100:2, estimated at peak rates" and head.split()[0] == "schedule"
    assert {row.split()[0] for row in rows} == {"fused"}
    assert re.fullmatch(r"schedule='\w+', bucket_cap_mb=\S+", best)
    assert main(["tune", "models.mlp:tiny", "--target", "b300:8"]) == 2


def test_reproduce_prints_three_digests_and_equal(capsys):
    assert main(["reproduce", "--steps", "3"]) == 0
    head, *digests, verdict = capsys.readouterr().out.splitlines()
    assert head == "mlp, 3 steps of 4 virtual replicas, optax.adamw(1e-3)" and verdict == "equal"
    assert [line.split()[0] for line in digests] == ["1", "2", "4"]
    assert len({line.split()[-1] for line in digests}) == 1


def test_where_calls_of_one_program_differ_nothing_is_claimed(capsys, monkeypatch):
    """XLA:CPU with several threads may differ in this way."""
    calls = count()
    number = distinct(lambda x: x + next(calls) // 25, np.zeros(2))
    assert number == 2
    monkeypatch.setattr("fddp.analysis.reproduction.distinct", lambda *args: number)
    assert main(["reproduce", "--steps", "1", "--replicas", "1,2"]) == 1
    assert "no claim: 50 calls of one program gave 2 results" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "virtual_replicas cannot promise equal bits here" in capsys.readouterr().out


def test_doctor_names_what_is_here(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for words in (
        f"jax                     {jax.__version__}",
        "8 × cpu",
        "backend mpi",
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "gpt"], "module:function, such as train:workload, "),
        (["plan", "models/gpt.py:tiny"], "'mlp' and 'transformer'; got 'models/gpt.py:tiny'"),
        (["plan", "os:getcwd"], "os:getcwd returned str "),
        (["plan", "models.gpt:tiny", "--rows", "0"], "--rows must be 1 or more, got 0"),
        (["audit", "models.gpt:tiny", "--rows", "-3"], "--rows must be 1 or more, got -3"),
        (["tune", "models.mlp:tiny", "--rows", "0"], "--rows must be 1 or more, got 0"),
        (["measure", "models.mlp:tiny", "--steps", "0"], "--steps must be 1 or more, got 0"),
        (
            ["measure", "models.mlp:tiny", "--trace", "none/t.json"],
            "--trace: there is no folder none",
        ),
        (
            ["audit", "models.mlp:tiny", "--picture", "none/x.png"],
            "--picture: there is no folder none",
        ),
        (["plan", "models.nothing:tiny"], "No module named 'models.nothing'"),
        (["plan", "models.gpt:huge"], "presets are tiny, bytes, 360m"),
        (["plan", "json:x"], "json has no function 'x': "),
        (
            ["plan", "models.gpt:tiny", "--bucket-cap-mb", "-1"],
            "bucket_cap_mb must be 0 or more MiB",
        ),
        (["audit", "models.gpt:tiny", "--target", "b300"], "a100, h100, h200"),
    ],
)
def test_a_wrong_word_is_an_error_of_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("python -m fddp: ") and error.count("\n") == 1


def test_the_command_says_its_version_and_the_caps_that_it_takes(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fddp {version('fddp')}\n"
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "as of fddp.train_step (default 25)" in capsys.readouterr().out


def test_the_command_starts_quietly_and_explains_itself(capsys):
    env = {name: value for name, value in one_device().items() if name != "JAX_PLATFORMS"}
    words = [sys.executable, "-m", "fddp", "doctor"]
    run = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert run.stderr == "" and run.stdout.startswith("Python")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out.startswith("usage: python -m fddp")


@pytest.mark.parametrize("words", [["--help"], ["tune", "--help"], ["audit", "mlp", "--rows", "0"]])
def test_help_and_wrong_options_load_no_observer(words):
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


### The workload of a user


WORKLOADS = """
import jax, jax.numpy as jnp, numpy as np

def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

def plain():
    batch = {"x": np.arange(18.0).reshape(6, 3), "y": np.arange(6.0)}
    return loss_fn, {"w": np.ones(3, np.float32)}, jax.tree.map(np.float32, batch)

def large():
    _, _, batch = plain()
    return loss_fn, {"w": jax.ShapeDtypeStruct((3,), np.float32)}, batch

def with_buffers():
    def loss(params, batch, *, model_state):
        return loss_fn(params, batch), (model_state + 1, {"twice": 2 * loss_fn(params, batch)})
    return loss, *plain()[1:], np.zeros(2, np.float32)

def uneven():
    return loss_fn, {}, {"x": np.ones(3), "y": np.ones(2)}
"""


@pytest.fixture
def workloads(tmp_path, monkeypatch) -> None:
    """A folder of a user, who has written the module `of_a_user`."""
    (tmp_path / "of_a_user.py").write_text(WORKLOADS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", ["plain", "with_buffers", "large"])
def test_a_plan_of_a_function_is_that_of_its_loss(workloads, capsys, name):
    assert main(["plan", f"of_a_user:{name}"]) == 0
    assert "1 of 1 leaves in 1 bucket" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["of_a_user:plain", "of_a_user:with_buffers", "transformer"])
def test_measure_and_reproduce_run_a_function(workloads, capsys, name):
    assert main(["measure", name, "--steps", "1"]) == 0
    assert main(["reproduce", name, "--steps", "2", "--replicas", "1,2", "--rows", "3"]) == 0
    printed = capsys.readouterr().out
    rows = 8 if name == "transformer" else 6
    assert printed.startswith(f"{name}, {rows} rows per replica, optax.adamw(1e-3)\n1 steps, ")
    assert f"\n{name}, 2 steps of 2 virtual replicas, optax.adamw(1e-3)\n" in printed


def test_replicas_get_different_rows_of_the_batch(workloads):
    workload = find_workload("of_a_user:plain")(4, 3, seed=1)
    x, y = workload.batch["x"], workload.batch["y"]
    assert x.shape == (12, 3) and len(set(y)) > 3
    assert np.array_equal(x[:, 0], 3 * y)  # a row stays a row
    assert not np.array_equal(y, find_workload("of_a_user:plain")(4, 3, seed=2).batch["y"])


def test_a_batch_of_uneven_leaves_is_refused(workloads, capsys):
    assert main(["plan", "of_a_user:uneven"]) == 2
    assert "the leaves of its batch need equally many rows" in capsys.readouterr().err


@pytest.mark.aot
@pytest.mark.parametrize("name", ["of_a_user:large", "mlp"])
def test_a_function_is_audited_and_tuned_for_gpus(workloads, capsys, name):
    assert main(["audit", name, "--target", "h100:2"]) in (0, 1)
    words = ["tune", name, "--target", "h100:2", "--caps", "25", "--rows", "2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{name}, ") == 2 and "h100:2, estimated at peak rates" in printed


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
        assert run.stderr == ""


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
