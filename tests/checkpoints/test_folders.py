"""Folders of checkpoints: a user's files stay, and damage of any kind costs the damaged checkpoint
alone."""

import errno
import json
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.checkpoints.files import Listed
from fddp.checkpoints.state_forms import check_fits

pytestmark = pytest.mark.steps

ROWS = np.sin(np.arange(24, dtype=np.float32)).reshape(8, 3)


def trained(step: fddp.TrainStep, folder: Path, steps: int) -> None:
    state = step.init(np.ones(3, np.float32))
    with fddp.Checkpoints(folder, step, every=1) as checkpoints:
        for _ in range(steps):
            state, _ = step(state, ROWS)
            checkpoints.save(state)


def restored(step: fddp.TrainStep, folder: Path) -> fddp.TrainState:
    with fddp.Checkpoints(folder, step) as checkpoints:
        return checkpoints.restore(step.init(np.ones(3, np.float32)))[0]


@pytest.fixture
def step(group: Callable[[int], fddp.Group]) -> fddp.TrainStep:
    return fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group(2))


def write_list(folder: Path, text: str) -> None:
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    (folder / "fddp.json").write_text(json.dumps([digest, text]))


@pytest.mark.parametrize(
    "name", ["met.office", "5.begun.by.me", "7.begun.0a1b2c3d.old", "8.orbax-checkpoint-tmp.bak"]
)
def test_a_folder_of_the_users_stays(tmp_path: Path, step: fddp.TrainStep, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "data.txt").write_text("mine")
    trained(step, tmp_path, 1)
    assert (tmp_path / name / "data.txt").read_text() == "mine"


def test_a_checkpoint_that_another_running_job_has_saved_is_not_replaced(
    tmp_path: Path, step: fddp.TrainStep, capfd: pytest.CaptureFixture[str]
):
    checkpoints = fddp.Checkpoints(tmp_path, step)
    state, _ = step(step.init(np.ones(3, np.float32)), 2 * ROWS)
    trained(step, tmp_path, 1)  # the other job, on other rows
    expected = np.asarray(restored(step, tmp_path).params)
    checkpoints.save(state, now=True)
    with pytest.raises(
        FileExistsError, match=f"another job has saved {tmp_path / '1'} since this job began"
    ):
        checkpoints.close()
    assert (
        "the checkpoint of step 1 could not be written: FileExistsError" in capfd.readouterr().err
    )
    np.testing.assert_array_equal(restored(step, tmp_path).params, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_job_that_begins_later_replaces_what_an_earlier_one_saved(
    tmp_path: Path, step: fddp.TrainStep
):
    trained(step, tmp_path, 1)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        state, _ = step(step.init(np.ones(3, np.float32)), 2 * ROWS)
        expected = np.asarray(state.params)
        checkpoints.save(state, now=True)
    np.testing.assert_array_equal(restored(step, tmp_path).params, expected)


def test_a_job_that_goes_back_replaces_what_it_saved_itself(
    tmp_path: Path, group: Callable[[int], fddp.Group]
):
    step = fddp.train_step(
        lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group(2), donate=False
    )
    start = step.init(np.ones(3, np.float32))
    with fddp.Checkpoints(tmp_path, step, keep=1) as checkpoints:
        for rows in (ROWS, 2 * ROWS):
            first, _ = step(start, rows)
            checkpoints.save(first, now=True)
            second, _ = step(first, rows)
            checkpoints.save(second, now=True)
    np.testing.assert_array_equal(restored(step, tmp_path).params, second.params)


@pytest.mark.parametrize("path", ["", "gs://bucket/x", "s3://bucket", "file:///tmp/x"])
def test_an_empty_path_and_a_url_are_refused(
    tmp_path: Path, step: fddp.TrainStep, path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path must be a folder of a file system"):
        fddp.Checkpoints(path, step)
    assert not list(tmp_path.iterdir())


def test_a_tilde_is_the_users_home(
    tmp_path: Path, step: fddp.TrainStep, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    trained(step, Path("~/saved"), 1)
    assert (tmp_path / "saved" / "1" / "fddp.json").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder_is_restored_from_and_not_saved_in(
    tmp_path: Path, step: fddp.TrainStep, code: int, monkeypatch: pytest.MonkeyPatch
):
    trained(step, tmp_path, 2)

    def refuse(path: Path, *_: Any, exist_ok: bool = False, **__: Any) -> None:
        if not exist_ok:  # root may write in any folder, so that rights would show nothing
            raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
        assert int(state.step) == 2
        with pytest.raises(OSError, match=f"nothing can be saved in .*: {os.strerror(code)}"):
            checkpoints.save(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_opened_is_an_error_as_before(
    tmp_path: Path, step: fddp.TrainStep, code: int, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        fddp.Checkpoints(tmp_path if code == errno.ENOSPC else tmp_path / "none", step)


@pytest.mark.parametrize("text", ["5", "[1, 2]", '{"forms": 5}', "null", "[" * 100_000])
def test_a_list_that_is_json_of_another_kind_is_damaged(
    tmp_path: Path, step: fddp.TrainStep, text: str, capfd: pytest.CaptureFixture[str]
):
    trained(step, tmp_path, 2)
    write_list(tmp_path / "2", text)
    assert int(restored(step, tmp_path).step) == 1
    (tmp_path / "2" / "fddp.json").write_text(text)
    assert int(restored(step, tmp_path).step) == 1
    assert capfd.readouterr().err.count("step 2 (fddp.json is damaged)") == 2


def test_a_field_that_a_later_version_adds_to_a_list_is_ignored(
    tmp_path: Path, step: fddp.TrainStep
):
    trained(step, tmp_path, 2)
    _, text = json.loads((tmp_path / "2" / "fddp.json").read_text())
    write_list(tmp_path / "2", json.dumps(json.loads(text) | {"later": [1]}))
    assert int(restored(step, tmp_path).step) == 2


def test_a_checkpoint_that_cannot_be_read_is_named_and_older_ones_are_tried(
    tmp_path: Path,
    step: fddp.TrainStep,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    trained(step, tmp_path, 2)
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if path == tmp_path / "2" / "fddp.json":  # root may read in any folder
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    assert int(restored(step, tmp_path).step) == 1
    assert "step 2 (fddp.json cannot be read: Permission denied)" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["fddp.json", "manifest.ocdbt"])
def test_a_pipe_among_the_files_is_damage_and_not_waited_for(
    tmp_path: Path, step: fddp.TrainStep, name: str
):
    trained(step, tmp_path, 2)
    (tmp_path / "2" / name).unlink()
    os.mkfifo(tmp_path / "2" / name)
    assert int(restored(step, tmp_path).step) == 1


def test_uint4_buffers_come_back_bit_for_bit(tmp_path: Path, group: Callable[[int], fddp.Group]):
    def loss(w: Any, x: Any, buffers: Any) -> tuple[Any, Any]:
        return jnp.mean((x @ w) ** 2), buffers

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), broadcast_buffers=False)
    buffer = jnp.arange(16, dtype=jnp.uint4).reshape(2, 8)
    state = step.init(np.ones(3, np.float32), model_state=buffer)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
        like = step.init(np.ones(3, np.float32), model_state=jnp.zeros_like(buffer))
        restored, _ = checkpoints.restore(like)
    assert fddp.whole(restored).model_state.dtype == jnp.uint4
    np.testing.assert_array_equal(
        np.asarray(fddp.whole(restored).model_state, np.int32), np.arange(16).reshape(2, 8)
    )


def test_forms_of_many_leaves_are_compared_in_linear_time(group: Callable[[int], fddp.Group]):
    ranks = group(1)
    leaves = {f"params/{i:06}": np.zeros(2, np.float32) for i in range(20_000)}
    listed = Listed({"replicas": 1}, {name: ("float32", [2]) for name in leaves}, {}, {})
    begin = time.process_time()
    assert check_fits(ranks, 1, listed, leaves) == set()
    assert (
        time.process_time() - begin < 2.0
    )  # each of 20,000 searches in a list of as many takes 0.2 ms and more
