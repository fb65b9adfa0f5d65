"""Damage of any kind to a folder costs the damaged checkpoint alone, and a user's files stay."""

import errno
import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp

pytestmark = pytest.mark.steps

ROWS = np.sin(np.arange(24, dtype=np.float32)).reshape(8, 3)


def trained(step: fddp.TrainStep, folder: Path, steps: int, rows: np.ndarray = ROWS) -> list[Any]:
    """Trains and saves each step; the parameters after each."""
    state = step.init(np.ones(3, np.float32))
    params = [np.asarray(state.params)]
    with fddp.Checkpoints(folder, step, every=1) as checkpoints:
        for _ in range(steps):
            state, _ = step(state, rows)
            checkpoints.save(state)
            params.append(np.asarray(state.params))
    return params


def restored(step: fddp.TrainStep, folder: Path) -> fddp.TrainState:
    with fddp.Checkpoints(folder, step) as checkpoints:
        return checkpoints.restore(step.init(np.ones(3, np.float32)))[0]


def saved(folder: Path) -> list[str]:
    """The checkpoints in a folder, also unfinished ones."""
    return sorted(path.name for path in folder.iterdir() if path.name[0].isdecimal())


@pytest.fixture
def step(group: Callable[[int], fddp.Group]) -> fddp.TrainStep:
    return fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group(2))


### Damage


def test_where_a_byte_has_changed_in_any_file_the_checkpoint_before_is_taken(
    tmp_path: Path, step: fddp.TrainStep, capfd: pytest.CaptureFixture[str]
):
    params = trained(step, tmp_path, 2)
    files = list((tmp_path / "2").iterdir())
    assert {"0.npz", "fddp.json"} == {file.name for file in files}
    for file in files:
        data = file.read_bytes()
        for place in (len(data) // 3, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            np.testing.assert_array_equal(restored(step, tmp_path).params, params[1])
            assert f"not whole: step 2 ({file.name} is damaged)" in capfd.readouterr().err
        file.write_bytes(data)


def test_a_missing_part_is_named_and_training_writes_the_checkpoint_again(
    tmp_path: Path, step: fddp.TrainStep, capfd: pytest.CaptureFixture[str]
):
    params = trained(step, tmp_path, 2)
    (tmp_path / "2" / "0.npz").unlink()
    with fddp.Checkpoints(tmp_path, step, every=1) as checkpoints:
        state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
        assert "not whole: step 2 (0.npz is missing)" in capfd.readouterr().err
        checkpoints.save(step(state, ROWS)[0])
    np.testing.assert_array_equal(restored(step, tmp_path).params, params[2])


def test_where_none_is_whole_nobody_begins_anew_unawares(tmp_path: Path, step: fddp.TrainStep):
    trained(step, tmp_path, 2)
    for path in tmp_path.rglob("0.npz"):
        path.write_bytes(b"nothing")
    message = r"none of the checkpoints in .* is whole: step 2 \((?s:.*)step 1 \("
    with pytest.raises(RuntimeError, match=message):
        restored(step, tmp_path)


@pytest.mark.parametrize("text", ["5", "[1, 2]", '{"forms": 5}', "null", "[" * 100_000])
def test_a_list_that_is_json_of_another_kind_is_damaged(
    tmp_path: Path, step: fddp.TrainStep, text: str, capfd: pytest.CaptureFixture[str]
):
    trained(step, tmp_path, 2)
    digest = blake2b(text.encode(), digest_size=16).hexdigest()
    for contents in (text, json.dumps([digest, text])):
        (tmp_path / "2" / "fddp.json").write_text(contents)
        assert int(restored(step, tmp_path).step) == 1
    assert capfd.readouterr().err.count("step 2 (fddp.json is damaged)") == 2


def test_an_unfinished_checkpoint_is_none_and_a_later_save_removes_it(
    tmp_path: Path, step: fddp.TrainStep
):
    params = trained(step, tmp_path, 2)
    (tmp_path / "2" / "fddp.json").unlink()
    names = ("8.begun.0a1b2c3d.4", "8.begun.0a1b2c3d.4.replaced", "met.0a1b2c3d")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.npz").write_bytes(b"half")
    assert int(restored(step, tmp_path).step) == 1
    assert all((tmp_path / name).exists() for name in names), "a reader removes nothing"
    with fddp.Checkpoints(tmp_path, step, every=1) as checkpoints:
        state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
        checkpoints.save(step(state, ROWS)[0])
    assert not any((tmp_path / name).exists() for name in names)
    np.testing.assert_array_equal(restored(step, tmp_path).params, params[2])


@pytest.mark.parametrize("name", ["met.office", "5.begun.by.me", "7.begun.0a1b2c3d.old"])
def test_a_folder_of_the_users_stays(tmp_path: Path, step: fddp.TrainStep, name: str):
    (tmp_path / name).mkdir()
    (tmp_path / name / "data.txt").write_text("mine")
    trained(step, tmp_path, 1)
    assert (tmp_path / name / "data.txt").read_text() == "mine"


### Disks


@contextmanager
def full_disk() -> Iterator[None]:
    """Limits the files of this process to one byte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_nothing_older_and_is_told(
    tmp_path: Path, step: fddp.TrainStep, capsys: pytest.CaptureFixture[str]
):
    params = trained(step, tmp_path, 4)
    checkpoints = fddp.Checkpoints(tmp_path, step, every=1)
    state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
    with full_disk():
        state, _ = step(state, ROWS)
        checkpoints.save(state)
        checkpoints._writing.result()
    assert "fddp: the checkpoint of step 5 could not be written" in capsys.readouterr().err
    assert saved(tmp_path) == ["2", "3", "4"]
    np.testing.assert_array_equal(restored(step, tmp_path).params, params[4])
    state, _ = step(state, ROWS)  # there is room again
    expected = np.asarray(state.params)
    checkpoints.save(state)
    checkpoints.close()
    np.testing.assert_array_equal(restored(step, tmp_path).params, expected)


def test_if_the_last_could_not_be_written_closing_says_so(tmp_path: Path, step: fddp.TrainStep):
    checkpoints = fddp.Checkpoints(tmp_path, step, every=1)
    with full_disk():
        checkpoints.save(step(step.init(np.ones(3, np.float32)), ROWS)[0])
        with pytest.raises(OSError, match="File too large"):
            checkpoints.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder_is_restored_from_and_saving_is_an_error_at_the_end(
    tmp_path: Path, step: fddp.TrainStep, code: int, monkeypatch: pytest.MonkeyPatch
):
    trained(step, tmp_path, 2)
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path.name.startswith("met.") or ".begun." in path.name:  # root may write in any folder
            raise OSError(code, os.strerror(code), str(path))
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    checkpoints = fddp.Checkpoints(tmp_path, step, every=1)
    state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
    assert int(state.step) == 2
    checkpoints.save(step(state, ROWS)[0])
    with pytest.raises(OSError, match=os.strerror(code)):
        checkpoints.close()
    assert saved(tmp_path) == ["1", "2"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_opened_is_an_error(
    tmp_path: Path, step: fddp.TrainStep, code: int, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        fddp.Checkpoints(tmp_path if code == errno.ENOSPC else tmp_path / "none", step)


def test_a_job_that_goes_back_replaces_what_it_saved_itself_and_keeps_newer_ones(
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
        checkpoints.save(first, now=True)
    np.testing.assert_array_equal(restored(step, tmp_path).params, second.params)
    assert saved(tmp_path) == ["1", "2"]


### Paths


@pytest.mark.parametrize("path", ["", "gs://bucket/x", "s3://bucket", "file:///tmp/x"])
def test_an_empty_path_and_a_url_are_refused(
    tmp_path: Path, step: fddp.TrainStep, path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path must be a folder of a file system"):
        fddp.Checkpoints(path, step)
    assert not list(tmp_path.iterdir())


def test_a_tilde_is_the_users_home_and_a_folder_is_where_it_was_opened(
    tmp_path: Path, step: fddp.TrainStep, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    trained(step, Path("~/saved"), 1)
    assert saved(tmp_path / "saved") == ["1"]
    monkeypatch.chdir(tmp_path)
    with fddp.Checkpoints("here", step) as checkpoints:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(step(step.init(np.ones(3, np.float32)), ROWS)[0], now=True)
    assert saved(tmp_path / "here") == ["1"]


def test_numpy_reads_a_whole_state(tmp_path: Path, step: fddp.TrainStep):
    params = trained(step, tmp_path, 1)
    with np.load(tmp_path / "1" / "0.npz") as archive:
        np.testing.assert_array_equal(archive["params[0:3]"], params[1])
