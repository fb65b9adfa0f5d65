"""The scripts in models/ work as a user runs them: with fddp installed, in a separate folder."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from boxes import TOLERANCE, Box, boxes, check_output
from processes import STRICT, UNOPTIMIZED, free_port

import fddp
from models import data, gpt

pytestmark = pytest.mark.steps

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "models"
# -S: an editable installation would put the checkout on the path.
PYTHON = (sys.executable, "-S", *STRICT)
WARNED = re.compile("warning|donated", re.IGNORECASE)
PARAMETERS = 90_432  # of the tiny GPT
# What a page's command starts. With -S mpi4py would not find the MPI of this environment.
PROGRAMS = {
    "python": (sys.executable, *STRICT),
    "mpiexec": (str(Path(sys.executable).with_name("mpiexec")),),
}
SHOWN = [
    box
    for page in sorted((ROOT / "docs").glob("*.md"))
    for box in boxes(page.read_text())
    if box.language == "bash"
]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder from which fddp can be imported, and nothing else of the checkout."""
    (tmp_path / "fddp").symlink_to(ROOT / "fddp")
    return tmp_path


def environment(home: Path, **env: str) -> dict[str, str]:
    packages = Path(np.__file__).parents[1]
    return (
        os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{home}{os.pathsep}{packages}"} | env
    )


def quick(
    home: Path, script: str, *words: str, devices: int = 1, before: tuple[str, ...] = ()
) -> str:
    """The output of a script, which must be free of warnings."""
    command = [*before, *PYTHON, str(MODELS / script), "--quick", *words]
    return finish(home, command, environment(home, JAX_NUM_CPU_DEVICES=str(devices)))


def finish(home: Path, command: list[str], env: dict[str, str]) -> str:
    completed = subprocess.run(
        command, cwd=home, env=env, text=True, capture_output=True, timeout=600
    )
    output = f"{completed.stdout}\n{completed.stderr}"
    summary = f"{' '.join(command)} ended with {completed.returncode}:\n{output}"
    assert completed.returncode == 0, summary
    assert not WARNED.search(output), summary
    return completed.stdout


@contextmanager
def two_ranks(home: Path, *command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that meet over Gloo; whatever happens none of them stays."""
    env = environment(home, FDDP_SIZE="2", FDDP_COORDINATOR=f"127.0.0.1:{free_port()}")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(command, cwd=home, env=env | {"FDDP_RANK": str(rank)}, **streams)
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def numbers(pattern: str, output: str) -> list[float]:
    """The numbers in the only match of a pattern in a script's output."""
    matches = re.findall(pattern, output)
    assert len(matches) == 1, output
    return [
        float(number.replace(",", ""))
        for number in (matches[0] if isinstance(matches[0], tuple) else matches)
    ]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+, loss ([\d.]+)", output)]


### Output of each script


@pytest.mark.slow  # test_train.py trains with it, too
def test_the_training_script_learns_on_devices_of_one_process_and_draws_its_losses(home: Path):
    output = quick(home, "train.py", "--replicas", "4", "--out", "drawn")
    assert "4 × cpu · backend local · processes: 1" in output and "60/60 steps" in output
    first, last = numbers(r"training loss +([\d.]+) → ([\d.]+)", output)
    assert last < first - 0.2
    assert numbers(r"test accuracy +([\d.]+)%", output)[0] > 30
    assert (home / "drawn" / "resnet-tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.ranks
def test_two_hosts_that_meet_every_eighth_step_send_an_eighth_of_ddps_bytes(home: Path):
    with two_ranks(home, *PYTHON, str(MODELS / "diloco.py"), "--quick") as ranks:
        output, silent = (rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and not WARNED.search(output + silent), (
        output + silent
    )
    assert "loss" in output and "loss" not in silent
    nbytes, of_ddp, steps = numbers(
        r"each replica sent ([\d,]+) bytes, DDP sends ([\d,]+) in (\d+) steps", output
    )
    # Each of two replicas sends its summands once: the parameters, and a few scalars.
    assert 4 * 4 * PARAMETERS <= nbytes <= 4 * (4 * PARAMETERS + 64)
    assert steps == 32 and steps * 4 * PARAMETERS <= of_ddp <= steps * (4 * PARAMETERS + 64)
    assert losses(output)[-1] < losses(output)[0]
    assert numbers(r"2 replicas, ([\d.]+) bits per byte", output)[0] < 6


@pytest.mark.slow
def test_each_replica_holds_its_part_and_what_it_saves_is_the_whole(
    home: Path, group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str]
):
    output = quick(home, "sharded.py", "--save", "saved", devices=4)
    local_mib, total_mib = numbers(
        r"each of 4 replicas holds ([\d.]+) MiB, the state has ([\d.]+) MiB", output
    )
    assert total_mib == pytest.approx(3 * 4 * PARAMETERS / 2**20, abs=1e-3)
    assert local_mib == pytest.approx(total_mib / 4, abs=1e-3)
    assert losses(output)[-1] < 0.7 * losses(output)[0]

    model = gpt.PRESETS["tiny"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
    step = fddp.train_step(gpt.loss_fn(model), optimizer, group=group(1), has_aux=True)
    params, _ = gpt.init(model, jax.random.key(1), gpt.batch(model, 1))
    with fddp.Checkpoints(home / "saved", step) as checkpoints:
        state, _ = checkpoints.restore(step.init(params))
    assert "it was on 4 replicas and is on 1" in capfd.readouterr().err
    _, held_out = data.read_text(None, model.context)
    rows = held_out[:: len(held_out) // 256 + 1].astype(np.int32)
    nats, _ = jax.jit(gpt.loss_fn(model))(state.params, {"tokens": rows})
    assert numbers(r"([\d.]+) bits per byte", output)[0] == pytest.approx(
        float(nats) / np.log(2), abs=2e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "expected_lines"),
    [
        (
            "tensor_parallel.py",
            ["--replicas", "2"],
            ["2 replicas × 2 devices", "20 of 20 leaves in 1 bucket"],
        ),
        (
            "pipeline.py",
            ["--stages", "2", "--micro-batches", "4", "--layers", "2"],
            ["2 replicas × 2 stages, 4 micro-batches", "bubble 20% of the ticks"],
        ),
    ],
)
def test_each_device_of_a_replica_holds_half_of_a_gpt_that_learns(
    home: Path, script: str, words: list[str], expected_lines: list[str]
):
    output = quick(home, script, *words)
    first, last = numbers(r"loss (\S+) → (\S+) in 20 steps", output)
    assert last < 0.7 * first
    total_mib, local_mib = numbers(
        r"parameters (\S+) MiB, of which each device holds (\S+) MiB", output
    )
    assert total_mib == pytest.approx(4 * PARAMETERS / 2**20, abs=1e-3)
    assert local_mib == pytest.approx(total_mib / 2, abs=2e-3)
    assert [words for words in expected_lines if words not in output] == []


### The outputs on the pages


def name_of(box: Box) -> str:
    """The script that a command starts, or its subcommand of fddp."""
    return re.findall(r"[\w-]+\.py\b|(?<=-m fddp )\w+", box.source)[-1]


@pytest.mark.quick("with_nnx.py")
@pytest.mark.parametrize("box", [pytest.param(box, id=name_of(box)) for box in SHOWN])
def test_a_command_prints_what_its_page_shows(home: Path, box: Box):
    if "--target" in box.source and jax.__version_info__[:2] != (0, 10):
        pytest.skip("the page shows the schedule of JAX 0.10's compiler")
    if "mpiexec" in box.source and not Path(*PROGRAMS["mpiexec"]).exists():
        pytest.skip("there is no mpiexec: install the extra 'mpi'.")
    (home / "models").symlink_to(MODELS)
    if f"models/{name_of(box)}" not in box.source:
        (home / name_of(box)).write_text(box.script)
    words = shlex.split(box.source.replace("\\\n", " "))
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    command = [x for word in words[len(variables) :] for x in PROGRAMS.get(word, (word,))]
    env = {name: x for name, x in environment(home).items() if name not in UNOPTIMIZED}
    check_output(box, finish(home, command, env | variables), _tolerance(name_of(box)))


def _tolerance(script: str) -> float:
    """The share by which losses may differ: more where a script learns the sources of a Python that
    is not the pages' 3.11."""
    file = MODELS / script
    learns_python = file.exists() and "read_text(None" in file.read_text()
    return 0.3 if learns_python and sys.version_info[:2] != (3, 11) else TOLERANCE


### A job that is ended


def read_until(words: str, process: subprocess.Popen[str]) -> str:
    """Waits until a process prints a text."""
    output = ""
    assert process.stdout
    for line in process.stdout:
        output += line
        if words in line:
            return output
    raise AssertionError(output)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_job_that_sigterm_ended_goes_on_to_the_bits_of_one_that_nobody_ended(home: Path):
    example = str(MODELS / "resume.py")
    supervised = (
        *PYTHON,
        "-m",
        "fddp",
        "run",
        "-n",
        "2",
        "--by",
        "processes",
        "--restarts",
        "3",
        "--",
    )
    with two_ranks(home, *PYTHON, example, "--quick", "--folder", "calm") as ranks:
        calm, _ = (rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and not WARNED.search(calm), calm
    assert "begins after step 0 of 30" in calm and "step 30, loss" in calm

    command = [*PYTHON, example, "--quick", "--folder", "ended"]
    with two_ranks(home, *command) as ranks:
        output = read_until("begins after step 0", ranks[0])
        ranks[1].send_signal(signal.SIGTERM)
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    output += "".join(outputs)
    assert [rank.returncode for rank in ranks] == [0, 0], output
    (saved,) = numbers(r"told to end, saved after step (\d+)", output)
    assert 0 < saved < 30 and [path.name for path in (home / "ended").iterdir()] == [
        f"{saved:.0f}"
    ], output
    resumed = quick(home, "resume.py", "--folder", "ended", before=supervised)
    assert f"begins after step {saved:.0f} of 30" in resumed
    bits = re.compile(r"parameters ([0-9a-f]{16})")
    assert bits.findall(resumed) == bits.findall(calm) != []


### All of them

TESTED = {
    "train.py": test_the_training_script_learns_on_devices_of_one_process_and_draws_its_losses,
    "with_nnx.py": test_a_command_prints_what_its_page_shows,
    "with_linen.py": test_a_command_prints_what_its_page_shows,
    "diloco.py": test_two_hosts_that_meet_every_eighth_step_send_an_eighth_of_ddps_bytes,
    "sharded.py": test_each_replica_holds_its_part_and_what_it_saves_is_the_whole,
    "tensor_parallel.py": test_each_device_of_a_replica_holds_half_of_a_gpt_that_learns,
    "pipeline.py": test_each_device_of_a_replica_holds_half_of_a_gpt_that_learns,
    "clip.py": test_a_command_prints_what_its_page_shows,
    "resume.py": test_a_job_that_sigterm_ended_goes_on_to_the_bits_of_one_that_nobody_ended,
}


def test_every_script_of_models_is_tested_here_and_stands_on_the_page():
    scripts = {
        path.name for path in MODELS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
    }
    page = (ROOT / "docs" / "examples.md").read_text()
    assert scripts == set(TESTED)
    assert [
        name
        for name in scripts
        if f"`models/{name}`" not in page or f"python models/{name}" not in page
    ] == []
