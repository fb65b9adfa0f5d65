"""`fddp.launch`: ranks started from Python return their results, and all end when one fails or the
caller does."""

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import TESTS, WORKERS

import fddp
from fddp.runtime import spawn

END_S = 300.0  # a last resort
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def on_a_path(monkeypatch: pytest.MonkeyPatch):
    """Puts fddp on the path of the ranks."""
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")
    monkeypatch.setenv("FDDP_GRACE_S", "1")


class Trained(NamedTuple):
    rank: int
    processes: int
    backend: str
    params: float
    variables: list[str | None]


def trained(start: float, names: Sequence[str]) -> Trained:
    group = fddp.init()
    step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5), group=group)
    state, _ = step(step.init(jnp.asarray(start)), jnp.full(8, 2.0 * group.rank))
    variables = [os.environ.get(name) for name in names]
    return Trained(group.rank, group.processes, group.backend, float(state.params), variables)


def noted(folder: str, how: str) -> None:
    """Rank 1 fails in this way once both have written down their numbers; rank 0 waits for it."""
    group = fddp.init()
    (Path(folder) / f"rank{group.rank}").write_text(str(os.getpid()))
    group.barrier()
    if group.rank and how == "raises":
        raise ArithmeticError("on purpose")
    if group.rank and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    time.sleep(600)


def shut(folder: str) -> None:
    """Closes all files but the one for its caller's end, then prints so, and stays."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    os.closerange(3, caller.sentinel)
    os.closerange(caller.sentinel + 1, 1024)
    (Path(folder) / "rank0").write_text(str(os.getpid()))
    time.sleep(600)


def a_lock(_: object) -> object:
    return threading.Lock()


def all_gone(folder: Path) -> bool:
    """True if all ranks that have written their numbers down are gone, soon."""
    numbers = [int(path.read_text()) for path in folder.glob("rank*")]
    until = time.monotonic() + END_S
    while numbers and time.monotonic() < until:
        numbers = [number for number in numbers if lives(number)]
        time.sleep(0.05)
    return not numbers


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.ranks
def test_ranks_train_though_their_caller_has_used_jax_and_leave_its_variables_alone():
    assert jax.devices() and float(jnp.ones(()) + 1) == 2
    names = ["FDDP_RANK", "FDDP_SIZE", "FDDP_LOCAL_RANK", "JAX_PLATFORMS"]
    before = dict(os.environ)
    # From 0, half of the mean of the gradients 2(0 - 0) and 2(0 - 2) back.
    assert fddp.launch(trained, 2, 0.0, names, timeout_s=END_S) == [
        Trained(rank, 2, "gloo", 1.0, [str(rank), "2", str(rank), "cpu"]) for rank in range(2)
    ]
    assert dict(os.environ) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "rank 1 of 2 failed:\nTraceback .*in noted\n.*ArithmeticError: on purpose"),
        ("killed", "rank 1 of 2 ended by SIGKILL and has not returned"),
    ],
)
def test_the_rank_that_fails_is_named_with_its_traceback_and_all_end(
    how: str, message: str, tmp_path: Path
):
    with pytest.raises(RuntimeError, match=f"(?s)^fddp.launch: {message}"):
        fddp.launch(noted, 2, str(tmp_path), how, timeout_s=END_S)
    assert len(list(tmp_path.iterdir())) == 2 and all_gone(tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("leave", "code", "message"),
    [
        (os._exit, 0, "ended with exit code 0 and has not returned from the function"),
        (sys.exit, 3, "failed:\nTraceback .*SystemExit: 3"),
    ],
    ids=["os._exit", "sys.exit"],
)
def test_a_rank_that_leaves_without_a_result_has_failed_whatever_its_exit_code(
    leave: Callable[[int], None], code: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spawn, "WATCHERS_S", 0.0)  # a rank alone has none
    with pytest.raises(RuntimeError, match=f"(?s)^fddp.launch: rank 0 of 1 {message}"):
        fddp.launch(leave, 1, code, timeout_s=END_S)


def without_reader() -> None:
    """Fails with lines in its buffer that no process takes."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    os.close(reader)
    sys.stdout.write("progress")
    raise ArithmeticError("on purpose")


@pytest.mark.ranks
def test_the_error_of_a_rank_without_a_reader_of_its_output_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1 failed:.*ArithmeticError"):
        fddp.launch(without_reader, 1, timeout_s=END_S)


@pytest.mark.ranks
def test_ranks_that_have_not_ended_in_time_are_ended():
    before = multiprocessing.active_children()
    pattern = r"fddp.launch\(timeout_s=0.5\): ranks 0, 1 of 2 have not ended in time"
    with pytest.raises(TimeoutError, match=pattern):
        fddp.launch(time.sleep, 2, 600, timeout_s=0.5)
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.ranks
def test_the_time_holds_for_a_rank_that_has_closed_its_files_and_seems_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written = tmp_path / "rank0"

    def elapsed() -> float:
        """The whole time has passed once the rank has closed its files."""
        return 2 * END_S if written.exists() and written.read_text() else 0.0

    monkeypatch.setattr(spawn, "time", SimpleNamespace(monotonic=elapsed, sleep=time.sleep))
    with pytest.raises(TimeoutError, match="ranks 0 of 1 have not ended in time"):
        fddp.launch(shut, 1, str(tmp_path), timeout_s=END_S)
    assert all_gone(tmp_path)


# For the ranks SIGTERM, which no handler of their caller takes, is the same as SIGKILL.
@pytest.mark.quick("9")
@pytest.mark.ranks
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=slow),
    ],
)
def test_no_rank_outlives_a_caller_that_is_interrupted_or_killed(
    number: signal.Signals, tmp_path: Path
):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, str(WORKERS / "spawns.py"), str(tmp_path)]
    caller = subprocess.Popen(
        words, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until = time.monotonic() + END_S
        while len(list(tmp_path.glob("rank*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(list(tmp_path.glob("rank*"))) == 2
        os.kill(caller.pid, number)
        assert all_gone(tmp_path)
        caller.wait(END_S)
    finally:
        caller.kill()
        err = caller.communicate()[1]
    if number != signal.SIGINT:  # after which the caller itself ends the ranks
        for rank in range(2):
            assert f"fddp.launch: the caller has ended, and with it rank {rank}.\n" in err


@pytest.mark.ranks
def test_functions_without_a_name_need_cloudpickle_and_one_of_a_prompt_as_well(
    monkeypatch: pytest.MonkeyPatch,
):
    rows = np.arange(3)
    (doubled,) = fddp.launch(lambda: rows * 2, 1, timeout_s=END_S)
    assert doubled.tolist() == [0, 2, 4]
    prompt = (
        "import fddp\ndef own(x): return x + 1\nif __name__ == '__main__': print(fddp.launch(own, "
        "1, 1))"
    )
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    completed = subprocess.run(
        [sys.executable, "-c", prompt], env=env, capture_output=True, text=True, timeout=END_S
    )
    assert (completed.stdout, completed.returncode) == ("[2]\n", 0), completed.stderr
    without = lambda name: None if name == "cloudpickle" else importlib.util.find_spec(name)  # noqa: E731
    monkeypatch.setattr(spawn, "find_spec", without)
    with pytest.raises(
        ValueError,
        match=r"<lambda> .* be sent .*: write it into a module .*, or pip install cloudpickle",
    ):
        fddp.launch(lambda: rows, 2)


# The ranks import the script and skip this block.
UNDER_MAIN = """
import fddp
if __name__ == "__main__":
    def inner(): pass
    fddp.launch(inner, 1)
"""


@pytest.mark.ranks
def test_a_function_that_ranks_cannot_find_in_the_script_is_told(tmp_path: Path):
    script = tmp_path / "under_main.py"
    script.write_text(UNDER_MAIN)
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    completed = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=END_S
    )
    assert "Can't get attribute 'inner'" in completed.stderr
    assert completed.stderr.endswith(
        "define it in a module, or in the script above `if __name__ == '__main__':`.\n\n"
    )


@pytest.mark.parametrize("number", [1, 2])
def test_an_argument_that_cannot_be_pickled_is_named(number: int):
    args: list[object] = [1.0, 2.0]
    args[number - 1] = threading.Lock()
    with pytest.raises(TypeError, match=rf"argument {number} of getenv cannot be pickled \(.*lock"):
        fddp.launch(os.getenv, 2, *args)


@pytest.mark.ranks
def test_a_result_that_cannot_be_pickled_is_named():
    with pytest.raises(
        RuntimeError, match=r"of a_lock cannot be pickled; return .* or fddp.whole\(state\)"
    ):
        fddp.launch(a_lock, 1, None, timeout_s=END_S)


@pytest.mark.parametrize(
    ("processes", "timeout_s", "message"),
    [
        (0, None, "processes must be a whole number of 1 or more, got 0"),
        ("2", None, "processes must be a whole number of 1 or more, got '2'"),
        (2.0, None, "processes must be a whole number of 1 or more, got 2.0"),
        (True, None, "processes must be a whole number of 1 or more, got True"),
        (1, 0.0, "timeout_s must be more than 0 seconds, got 0.0"),
        (1, "60", "timeout_s must be more than 0 seconds, got '60'"),
    ],
)
def test_numbers_out_of_range_are_refused(processes: Any, timeout_s: Any, message: str):
    with pytest.raises(ValueError, match=f"^fddp.launch: {message}"):
        fddp.launch(os.getpid, processes, timeout_s=timeout_s)


def test_what_is_not_a_function_starts_no_process():
    wrong: Any = None
    with pytest.raises(TypeError, match=r"^fddp.launch: fn must be a function, got None\.$"):
        fddp.launch(wrong, 1)
