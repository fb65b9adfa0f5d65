"""The training script: one command on any backend, the same losses on any number of replicas, a
page at the end."""

import gzip
import io
import math
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from processes import STRICT
from rich.console import Console
from rich.text import Text

import fddp
from models import data, train

pytestmark = pytest.mark.steps

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "models" / "train.py")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
GPT = replace(train.CONFIGS["gpt"], preset="tiny", steps=12, batch=8)
QUIET = Console(quiet=True)
TINY = ("--preset", "tiny", "--steps", "4")
PYTHON = (sys.executable, *STRICT)
WARNED = re.compile("warning|donated", re.IGNORECASE)


def run(*command: str, cwd: Path, **env: str) -> str:
    """Runs a command to its end, and shows its output if it fails; a warning is a failure."""
    completed = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        text=True,
        capture_output=True,
        timeout=600,
    )
    output = f"{completed.stdout}\n{completed.stderr}"
    summary = f"{' '.join(command)} ended with {completed.returncode}:\n{output}"
    assert completed.returncode == 0, summary
    assert not WARNED.search(output), summary
    return completed.stdout


def losses(config: train.Config, group: fddp.Group) -> list[float]:
    return train.train(train.TASKS[config.model](config), config, group, QUIET)[2].losses


@cache
def on_two(group: fddp.Group) -> list[float]:
    """Two replicas' losses of the GPT, to compare with."""
    return losses(GPT, group)


### The command


@pytest.mark.ranks
def test_two_processes_under_mpiexec_end_with_one_page_and_a_curve(tmp_path: Path):
    if not MPIEXEC.exists():
        pytest.skip("there is no mpiexec: install the extra 'mpi'.")
    output = run(
        str(MPIEXEC), "-n", "2", *PYTHON, SCRIPT, *TINY, "--bucket-cap-mb", "0.002", cwd=tmp_path
    )
    assert output.count("test accuracy") == 1, output
    # In several buckets its clipping and its schedule leave an update later than the count which it
    # reads.
    for words in (
        "ResNet tiny",
        "2 × cpu",
        "backend mpi",
        "4/4 steps",
        "training loss",
        "samples/s",
        "in 5 buckets",
    ):
        assert words in output, output
    assert (tmp_path / "runs" / "resnet-tiny.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_where_it_was_saved_and_counts_the_trainings_steps(
    group: Callable[[int], fddp.Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    saving = replace(GPT, resume=tmp_path, save_every=5)
    task = train.TASKS["gpt"](saving)
    state_at_end, _, uninterrupted = train.train(task, saving, group(2), QUIET)
    saved = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert saved == ["10", "12", "5"]  # the last step's, too
    # Of a training that has ended the same command has the state, to test it.
    state, _, nothing = train.train(task, saving, group(2), QUIET)
    jax.tree.map(np.testing.assert_array_equal, state.params, state_at_end.params)
    assert (nothing.step, nothing.losses) == (12, [])
    with pytest.raises(ValueError, match=r"--steps 8: the checkpoint in .* is of step 12"):
        losses(replace(saving, steps=8), group(2))

    (tmp_path / "12" / "fddp.json").unlink()  # as if it had been killed then

    def broken(params: Any, batch: Any) -> Any:
        loss, aux = task.loss_fn(params, batch)
        return loss * np.nan, aux

    with pytest.raises(FloatingPointError, match="the loss of step 11 is nan"):
        train.train(task._replace(loss_fn=broken), saving, group(2), QUIET)
    # As no step 12 was saved, no restart takes that for the end.
    *_, resumed = train.train(task, saving, group(2), QUIET)
    assert (resumed.start, resumed.step, resumed.losses) == (10, 12, uninterrupted.losses[10:])
    drawn: list[Any] = []
    monkeypatch.setattr(
        train.Figure, "savefig", lambda figure, path, dpi: drawn.extend(figure.axes[0].get_lines())
    )
    train.draw("a GPT", replace(saving, out=tmp_path / "runs"), resumed)
    assert [list(line.get_xdata()) for line in drawn] == [[11, 12], [11, 12]]


@pytest.mark.slow
def test_a_run_that_is_told_to_end_is_saved_after_that_step(
    group: Callable[[int], fddp.Group], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = iter([False, False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr(fddp, "preempted", lambda: next(answers))
        with pytest.raises(SystemExit) as end:
            losses(replace(GPT, resume=tmp_path), group(2))
    assert end.value.code == 0 and [path.name for path in tmp_path.iterdir()] == ["3"]
    assert losses(replace(GPT, resume=tmp_path), group(2)) == on_two(group(2))[3:]


@pytest.mark.slow
def test_a_command_that_has_finished_tests_again_what_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "tiny", "--steps", "2", "--resume", "saved"]
    printed = list[str]()
    for _ in range(2):
        train.main(train.read_config(words))
        printed.append(capsys.readouterr().out)
    first, second = printed
    line = re.compile(r"test accuracy .*images")
    assert line.findall(second) == line.findall(first) != []
    assert "after step 2 of 2" in second and "after step" not in first
    for words in ("training loss", "samples/s", "loss curve", "bucket"):
        assert words in first and words not in second, second


@pytest.mark.ranks
@pytest.mark.slow
def test_the_readmes_first_command_warns_of_nothing(tmp_path: Path):
    if not MPIEXEC.exists():
        pytest.skip("there is no mpiexec: install the extra 'mpi'.")
    assert "in 3 buckets" in run(
        str(MPIEXEC), "-n", "2", *PYTHON, SCRIPT, "--steps", "2", cwd=tmp_path
    )


@pytest.mark.ranks
# rows of ranks: tests/data/test_sampler.py; two processes: the test under mpiexec
@pytest.mark.slow
def test_two_gloo_processes_need_no_launcher_and_read_the_rows_that_one_would(
    tmp_path: Path, group: Callable[[int], fddp.Group]
):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {
            "FDDP_SIZE": "2",
            "FDDP_COORDINATOR": f"127.0.0.1:{probe.getsockname()[1]}",
            "JAX_PLATFORMS": "cpu",
        }
    ranks = [
        subprocess.Popen(
            [*PYTHON, SCRIPT, "gpt", *TINY, "--batch", "4"],
            cwd=tmp_path,
            env=os.environ | world | {"FDDP_RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    assert not WARNED.search("".join(outputs)), outputs
    assert "2 × cpu · backend gloo" in outputs[0] and "bits per byte" in outputs[0], outputs[0]
    assert "backend" not in outputs[1], outputs[1]
    local_losses = losses(replace(train.CONFIGS["gpt"], preset="tiny", steps=4, batch=4), group(1))
    (shown,) = re.findall(
        r"training loss +([0-9.]+) → ([0-9.]+)", outputs[0]
    )  # the first, and the mean of all four
    assert [float(loss) for loss in shown] == pytest.approx(
        [local_losses[0], np.mean(local_losses)], abs=1e-3
    )


@pytest.mark.parametrize("words", [["--help"], ["gpt", "--help"]])
def test_help_names_every_option(capsys: pytest.CaptureFixture[str], words: list[str]):
    with pytest.raises(SystemExit):
        train.read_config(words)
    options = set(re.findall(r"^\W (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert options == {f"--{field.name.replace('_', '-')}" for field in fields(train.Config)} - {
        "--model"
    }


def test_defaults_are_those_of_the_model_wherever_it_stands():
    assert train.read_config([]) == train.CONFIGS["resnet"]
    for words in (["gpt", "--steps", "2"], ["--steps", "2", "gpt"]):
        assert train.read_config(words) == replace(train.CONFIGS["gpt"], steps=2)
    quick = replace(train.CONFIGS["gpt"], preset="tiny", steps=60, quick=True)
    assert train.read_config(["gpt", "--quick"]) == quick
    assert train.read_config(["--quick", "--steps", "2", "gpt"]) == replace(quick, steps=2)


### The loop


def test_gpt_losses_do_not_depend_on_the_number_of_replicas_and_fall(
    group: Callable[[int], fddp.Group],
):
    one_replica = losses(GPT, group(1))
    two = on_two(group(2))
    assert one_replica == pytest.approx(two, abs=1e-4)
    assert two[-1] < two[0] - 0.5


def test_gpt_learns_while_each_replica_leaves_out_layers_of_its_own(
    group: Callable[[int], fddp.Group],
):
    all_layers = on_two(group(2))
    dropped = losses(replace(GPT, layer_drop=0.3), group(2))
    assert dropped[-1] < dropped[0] - 0.5
    assert dropped != pytest.approx(all_layers, abs=1e-3)


@pytest.mark.quick("1-lines", "12-bar")
@pytest.mark.parametrize("terminal", [True, False], ids=["bar", "lines"])
@pytest.mark.parametrize("steps", [1, 12])
def test_progress_tells_no_loss_before_there_is_one(
    group: Callable[[int], fddp.Group], terminal: bool, steps: int
):
    page = io.StringIO()
    console = Console(file=page, width=100, force_terminal=terminal)
    config = replace(GPT, steps=steps)
    train.train(train.TASKS["gpt"](config), config, group(1), console)
    assert f"{steps}/{steps} steps · loss " in Text.from_ansi(page.getvalue()).plain
    assert "nan" not in page.getvalue()


def test_several_processes_write_lines_even_to_a_terminal(
    group: Callable[[int], fddp.Group], monkeypatch: pytest.MonkeyPatch
):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("TERM", raising=False)
    two = group(2)
    first_process, first, second = (
        train.screen(replace(two, hosts=two.hosts._replace(ranks=range(count)), rank=rank))
        for count, rank in ((1, 0), (2, 0), (2, 1))
    )
    assert first_process.is_terminal and not first.is_terminal
    assert second.quiet and not first.quiet


def test_a_loss_that_is_no_number_ends_training_and_names_the_step(
    group: Callable[[int], fddp.Group],
):
    task = train.TASKS["gpt"](GPT)

    def broken(params: Any, batch: Any) -> Any:
        loss, aux = task.loss_fn(params, batch)
        return loss * np.nan, aux

    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        train.train(task._replace(loss_fn=broken), GPT, group(1), QUIET)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch": 7}, "--batch must be a multiple of 2"),
        ({"batch": 0}, "--batch must be"),
        ({"layer_drop": 1.0}, "--layer-drop is for gpt and must be from 0 to below 1, got 1.0"),
        ({"steps": 0}, "--steps must be 1 or more, got 0"),
        ({"preset": "huge"}, "--preset must be one of tiny, bytes, 360m, got 'huge'"),
    ],
)
def test_impossible_requests_are_told_apart(
    group: Callable[[int], fddp.Group], change: dict[str, Any], words: str
):
    with pytest.raises(ValueError, match=words):
        losses(replace(GPT, **change), group(2))


### The data


def idx(array: np.ndarray) -> bytes:
    """The format as Yann LeCun's page defines it."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_mnist_files_are_read_packed_or_not(tmp_path: Path):
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(5, 28, 28), dtype=np.uint8)
    labels = rng.integers(10, size=5, dtype=np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(images))
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images[:2])))
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        data.read_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:2]))
    for read, written in zip(data.read_mnist(tmp_path), (images, labels, images[:2], labels[:2])):
        np.testing.assert_array_equal(read, written)

    task = train.resnet_task(replace(train.CONFIGS["resnet"], preset="tiny", data=tmp_path))
    batch = task.batch(np.arange(5))
    assert (
        task.rows == 5
        and batch["image"].shape == (5, 28, 28, 1)
        and batch["image"].dtype == np.float32
    )


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match="begins with 89 50 4e, not 00 00 08"):
        data.read_idx(tmp_path / "file")


def test_digits_are_split_without_overlap():
    images, labels, test_images, test_labels = data.split_digits()
    assert images.shape == (1500, 8, 8) and test_images.shape == (297, 8, 8)
    assert len(labels) == 1500 and set(test_labels) == set(range(10))
    assert {x.tobytes() for x in images}.isdisjoint(x.tobytes() for x in test_images)


def test_every_byte_of_a_text_but_the_first_is_a_target_once():
    rows = data.windows([b"abcd", b"efghij"], context=3)
    assert [bytes(row) for row in rows] == [b"abcd", b"defg", b"ghij"]


def test_text_comes_from_files_of_which_some_are_held_out(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    (tmp_path / "a.txt").write_bytes(b"a" * 100)
    config = replace(GPT, data=tmp_path)
    with pytest.raises(FileNotFoundError, match="it has 1"):
        train.gpt_task(config)
    (tmp_path / "b.txt").write_bytes(b"b" * 100)
    task = train.gpt_task(config)
    assert set(task.batch(np.arange(task.rows))["tokens"].flat) == {ord("b")}
    step = fddp.train_step(task.loss_fn, optax.sgd(0.0), group=group(2), has_aux=True)
    results = task.test(step.init(task.params), group(2))
    assert math.isclose(
        float(results["held-out files"].split()[0]), 8, abs_tol=0.5
    )  # 256 bytes, all alike
    assert results["it writes"].startswith("def ")
