"""`fddp.launch`: ranks started from Python return their results, and all end when one fails or the caller does."""

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from processes import TESTS, WORKERS

import fddp
from fddp.runtime import spawn

END_S = 60.0


@pytest.fixture(autouse=True)
def on_a_path(monkeypatch: pytest.MonkeyPatch):
    """Where the ranks find fddp."""
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}{os.pathsep}{TESTS}")
    monkeypatch.setenv("FDDP_GRACE_S", "1")


def trained(start: float) -> tuple[int, int, str, float]:
    group = fddp.init()
    step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.5), group=group)
    state, _ = step(step.init(jnp.asarray(start)), jnp.full(8, 2.0 * group.rank))
    return group.rank, group.processes, group.backend, float(state.params)


def noted(folder: str, how: str) -> None:
    """Rank 1 fails in this way once both have written down who they are; rank 0 waits for it."""
    group = fddp.init()
    (Path(folder) / f"rank{group.rank}").write_text(str(os.getpid()))
    group.barrier()
    if group.rank and how == "raises":
        raise ArithmeticError("on purpose")
    if group.rank and how == "leaves":
        sys.exit(3)
    if group.rank and how == "dies":
        os._exit(7)
    if group.rank and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "stays":
        group.barrier()
    time.sleep(600)


def shut(folder: str) -> None:
    """Stays, and closes all files but the one that tells it of its caller's end."""
    (Path(folder) / "rank0").write_text(str(os.getpid()))
    caller = multiprocessing.parent_process()
    assert caller is not None
    os.closerange(3, caller.sentinel)
    os.closerange(caller.sentinel + 1, 1024)
    time.sleep(600)


def a_lock(_: object) -> object:
    return threading.Lock()


def variables(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def ended(folder: Path) -> bool:
    """Whether all ranks that have written their numbers down are gone, soon."""
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
def test_a_function_trains_on_ranks_though_its_caller_has_used_jax():
    assert jax.devices() and float(jnp.ones(()) + 1) == 2
    # From 0, half of the mean of the gradients 2(0 - 0) and 2(0 - 2) back.
    assert fddp.launch(trained, 2, 0.0, timeout_s=240) == [(0, 2, "gloo", 1.0), (1, 2, "gloo", 1.0)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "rank 1 of 2 failed:\nTraceback .*in noted\n.*ArithmeticError: on purpose"),
        ("leaves", "rank 1 of 2 failed:\nTraceback .*SystemExit: 3"),
        ("dies", "rank 1 of 2 ended with exit code 7 and has not returned from the function"),
        ("killed", "rank 1 of 2 ended by SIGKILL and has not returned"),
    ],
)
def test_the_rank_that_fails_is_named_with_its_traceback_and_all_end(how: str, told: str, tmp_path: Path):
    with pytest.raises(RuntimeError, match=f"(?s)^fddp.launch: {told}"):
        fddp.launch(noted, 2, str(tmp_path), how, timeout_s=240)
    assert len(list(tmp_path.iterdir())) == 2 and ended(tmp_path)


@pytest.mark.ranks
def test_ranks_that_have_not_ended_in_time_are_ended(tmp_path: Path):
    with pytest.raises(TimeoutError, match=r"fddp.launch\(timeout_s=20\): ranks 0, 1 of 2 have not ended in time"):
        fddp.launch(noted, 2, str(tmp_path), "stays", timeout_s=20)
    assert ended(tmp_path)


@pytest.mark.ranks
def test_a_rank_that_leaves_without_a_result_has_failed_though_its_exit_code_is_0():
    told = "^fddp.launch: rank 0 of 1 ended with exit code 0 and has not returned from the function"
    with pytest.raises(RuntimeError, match=told):
        fddp.launch(os._exit, 1, 0, timeout_s=120)


@pytest.mark.ranks
def test_the_time_holds_for_a_rank_that_has_closed_its_files_and_seems_to_have_ended(tmp_path: Path):
    with pytest.raises(TimeoutError, match="ranks 0 of 1 have not ended in time"):
        fddp.launch(shut, 1, str(tmp_path), timeout_s=20)
    assert ended(tmp_path) and list(tmp_path.iterdir())


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_a_caller_that_is_interrupted_or_killed(number: signal.Signals, tmp_path: Path):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, str(WORKERS / "spawns.py"), str(tmp_path)]
    caller = subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until = time.monotonic() + END_S
        while len(list(tmp_path.glob("rank*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(list(tmp_path.glob("rank*"))) == 2
        os.kill(caller.pid, number)
        assert ended(tmp_path)
        caller.wait(END_S)
    finally:
        caller.kill()
        caller.communicate()


@pytest.mark.ranks
def test_ranks_have_variables_of_their_own_and_the_caller_keeps_its():
    names = ["FDDP_RANK", "FDDP_SIZE", "FDDP_LOCAL_RANK", "JAX_PLATFORMS"]
    before = dict(os.environ)
    assert fddp.launch(variables, 2, names, timeout_s=120) == [["0", "2", "0", "cpu"], ["1", "2", "1", "cpu"]]
    assert dict(os.environ) == before


@pytest.mark.ranks
def test_functions_without_a_name_need_cloudpickle_and_one_of_a_prompt_as_well(monkeypatch: pytest.MonkeyPatch):
    rows = np.arange(3)
    assert [sum(found) for found in fddp.launch(lambda: rows * 2, 2, timeout_s=120)] == [6, 6]
    prompt = "import fddp\ndef own(x): return x + 1\nif __name__ == '__main__': print(fddp.launch(own, 2, 1))"
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", prompt], env=env, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("[2, 2]\n", 0), done.stderr
    without = lambda name: None if name == "cloudpickle" else importlib.util.find_spec(name)  # noqa: E731
    monkeypatch.setattr(spawn, "find_spec", without)
    with pytest.raises(ValueError, match=r"given .*<lambda>.*: write it into a module .*, or pip install cloudpickle"):
        fddp.launch(lambda: rows, 2)


@pytest.mark.ranks
def test_a_result_that_cannot_be_pickled_and_a_script_without_its_guard_are_told(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"what a_lock returned cannot be pickled; return arrays"):
        fddp.launch(a_lock, 1, None, timeout_s=120)
    script = tmp_path / "unguarded.py"
    script.write_text("import fddp, os\nprint(fddp.launch(os.getpid, 1))")
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.endswith("while it started: a script calls fddp.launch below `if __name__ == '__main__':`.\n")


@pytest.mark.parametrize(
    ("processes", "timeout_s", "says"),
    [
        (0, None, "processes must be a whole number of 1 or more, got 0"),
        ("2", None, "processes must be a whole number of 1 or more, got '2'"),
        (2.0, None, "processes must be a whole number of 1 or more, got 2.0"),
        (True, None, "processes must be a whole number of 1 or more, got True"),
        (1, 0.0, "timeout_s must be more than 0 seconds, got 0.0"),
        (1, "60", "timeout_s must be more than 0 seconds, got '60'"),
    ],
)
def test_numbers_out_of_range_are_refused(processes: Any, timeout_s: Any, says: str):
    with pytest.raises(ValueError, match=f"^fddp.launch: {says}"):
        fddp.launch(os.getpid, processes, timeout_s=timeout_s)


def test_what_is_not_a_function_starts_no_process():
    wrong: Any = None
    with pytest.raises(TypeError, match=r"^fddp.launch: fn must be a function, got None\.$"):
        fddp.launch(wrong, 1)
