"""Training resumes from checkpoints as if it had not ended, despite damaged files."""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from problems import with_dropout
from trees import bits, same_arrays

import fddp

pytestmark = pytest.mark.steps

ROWS = np.random.default_rng(5).normal(size=(40, 3)).astype(np.float32)


# A training of one kind: makes its step over a group, and its first state.
Make: TypeAlias = Callable[[fddp.Group], tuple[fddp.TrainStep, fddp.TrainState]]
# The same, and the newest checkpoint of a folder in place of the first state.
Restored: TypeAlias = Callable[[Path, fddp.Group], tuple[fddp.TrainStep, fddp.TrainState]]


def first(group: fddp.Group, **options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A step that uses all of a state; for example the scale of the loss grows."""
    optimizer = fddp.dynamic_scale(optax.adam(0.1), growth_interval=3)
    step = fddp.train_step(with_dropout, optimizer, group=group, bucket_cap_mb=0, **options)
    params = {
        "w": np.ones((3, 5), np.float32),
        "b": np.zeros(5, np.float32),
        "empty": np.zeros((0, 2), np.float32),
    }
    return step, step.init(params, model_state=np.zeros(3, np.float32), rng=jax.random.key(1))


KINDS: dict[str, Make] = {
    "whole": lambda group: first(
        group, hook=fddp.hooks.topk(0.4)
    ),  # it remembers the unsent numbers
    "shards": lambda group: first(group, shard="state"),
}


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    """Every claim is tested with whole states and with states in shards."""
    return KINDS[request.param]


@pytest.fixture
def restored(make: Make) -> Restored:
    def restored(folder: Path, group: fddp.Group) -> tuple[fddp.TrainStep, fddp.TrainState]:
        step, state = make(group)
        with fddp.Checkpoints(folder, step, every=2) as checkpoints:
            return step, checkpoints.restore(state)[0]

    return restored


def train(
    step: fddp.TrainStep,
    state: fddp.TrainState,
    until: int,
    checkpoints: fddp.Checkpoints | None = None,
) -> tuple[fddp.TrainState, list[float]]:
    """Trains up to a step, on the rows of each step; returns the losses."""
    rows = fddp.samples(len(ROWS), 8, start_step=int(state.step))
    losses = list[float]()
    for number in islice(rows, until - int(state.step)):
        state, info = step(state, ROWS[number])
        losses.append(float(info.loss))
        if checkpoints:
            checkpoints.save(state)
    return state, losses


@pytest.fixture(scope="module")
def ended_run(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of steps 2, 4 and 6 of a training that ended after its
    seventh."""
    folder = tmp_path_factory.mktemp("ended")
    step, state = make(
        fddp.mesh_group(jax.make_mesh((2,), ("replica",), devices=jax.devices()[:2]))
    )
    with fddp.Checkpoints(folder, step, every=2) as checkpoints:
        train(step, state, 7, checkpoints)
    return folder


@pytest.fixture
def trained(ended_run: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged."""
    return Path(shutil.copytree(ended_run, tmp_path / "saved"))


@pytest.mark.quick("shards")
def test_a_training_that_ended_goes_on_bit_for_bit(
    trained: Path, group: Callable[[int], fddp.Group], make: Make, restored: Restored
):
    calm, losses = train(*make(group(2)), 12)
    step, state = restored(trained, group(2))
    assert int(state.step) == 6
    remembered = jax.tree.leaves(state.hook_state)
    assert any(map(np.any, remembered)) == bool(remembered), "a hook remembers something"
    state, later = train(step, state, 12)
    assert later == losses[6:]
    same_arrays(state, calm)


def test_where_there_is_none_training_begins(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path / "none", step) as checkpoints:
        assert checkpoints.restore(state) == (state, None)


@pytest.mark.quick("shards")
def test_a_state_is_saved_after_every_so_many_steps_and_when_asked(
    group: Callable[[int], fddp.Group],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    make: Make,
):
    step, state = make(group(1))
    with fddp.Checkpoints(tmp_path, step, every=3, keep=2) as checkpoints:
        saved = list[int]()
        for number in range(1, 9):
            state, _ = step(state, ROWS[:8])
            if checkpoints.save(state, {"row": number}, now=number == 8):
                saved.append(number)
        assert not checkpoints.save(state, now=True), "this one is saved already"
    assert saved == [3, 6, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["6", "8"]
    step, fresh = make(group(1))
    with fddp.Checkpoints(tmp_path, step, every=3) as checkpoints:
        restored_state, place = checkpoints.restore(fresh)
        same_arrays(restored_state, state)
        assert place == {"row": 8}
        restored_state, _ = step(restored_state, ROWS[:8])
        assert checkpoints.save(restored_state), "the ninth"
    lines = [
        line for line in capfd.readouterr().err.splitlines() if "saves nothing" not in line
    ]  # on one replica
    assert lines == [f"fddp: training goes on from step 8, from {tmp_path}."]


@pytest.mark.quick("whole")
def test_nothing_is_due_while_gradients_are_pending(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step, every=1) as checkpoints:
        state, _ = step.no_sync(state, ROWS[:8])
        assert not checkpoints.save(state)
        state, _ = step(state, ROWS[:8])
        assert checkpoints.save(state)
        pending, _ = step.no_sync(state, ROWS[8:16])
        assert not checkpoints.save(pending)


def test_pending_gradients_are_saved_when_asked_and_come_back(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    step, state = make(group(2))
    state, _ = step(state, ROWS[:8])
    with fddp.Checkpoints(tmp_path, step, every=2) as checkpoints:
        state, _ = step(state, ROWS[:8])
        assert checkpoints.save(state)
        state, _ = step.no_sync(state, ROWS[8:16])
        assert checkpoints.save(state, 2, now=True)
    second_step, fresh = make(group(2))
    with fddp.Checkpoints(tmp_path, second_step) as checkpoints:
        restored_state, place = checkpoints.restore(fresh)
        same_arrays(restored_state, state)
        assert place == 2
        pending, _ = second_step.no_sync(fresh, ROWS[:8])
        same_arrays(checkpoints.restore(pending)[0], state)


### Damaged files


def newest(folder: Path) -> Path:
    return folder / "6"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_where_a_byte_has_changed_in_any_file_the_checkpoint_before_is_taken(
    trained: Path, group: Callable[[int], fddp.Group], capfd: pytest.CaptureFixture[str], make: Make
):
    calm, _ = train(*make(group(2)), 4)
    step, like = make(group(2))
    files = [path for path in newest(trained).rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        size = path.stat().st_size
        for place in {size // 3, size // 2, size - 1}:
            flip(path, place)
            with fddp.Checkpoints(trained, step, every=2) as checkpoints:
                same_arrays(checkpoints.restore(like)[0], calm)
            assert (
                f"not whole: step 6 ({path.relative_to(newest(trained))} is damaged)"
                in capfd.readouterr().err
            )
            flip(path, place)


def test_training_overwrites_what_is_damaged(
    trained: Path, group: Callable[[int], fddp.Group], restored: Restored
):
    next(newest(trained).rglob("manifest.ocdbt")).unlink()
    step, state = restored(trained, group(2))
    assert int(state.step) == 4
    with fddp.Checkpoints(trained, step, every=2) as checkpoints:
        state, _ = train(step, checkpoints.restore(state)[0], 6, checkpoints)
    same_arrays(restored(trained, group(2))[1], state)


def test_where_none_is_whole_nobody_begins_anew_unawares(
    trained: Path, group: Callable[[int], fddp.Group], restored: Restored
):
    for path in trained.rglob("manifest.ocdbt"):
        path.write_bytes(b"nothing")
    with pytest.raises(
        RuntimeError, match=r"none of the checkpoints in .* is whole: step 6 \((?s:.*)step 2 \("
    ):
        restored(trained, group(2))


@pytest.mark.quick("whole")
def test_a_checkpoint_that_was_not_finished_counts_as_none(
    group: Callable[[int], fddp.Group],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    make: Make,
    restored: Restored,
):
    """The process is killed, in effect, after Orbax was ready and before the list of files was
    written."""
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step, every=4, keep=1) as checkpoints:
        calm, _ = train(step, state, 4, checkpoints)
    (tmp_path / "4" / "fddp.json").unlink()
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step, every=4, keep=1) as checkpoints:
        state, _ = checkpoints.restore(state)
        assert int(state.step) == 0
        assert "not finished and are ignored: step [4]" in capfd.readouterr().err
        train(step, state, 4, checkpoints)
    same_arrays(restored(tmp_path, group(2))[1], calm)


def test_restoring_waits_for_what_is_being_written(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step, every=1) as checkpoints:
        state, _ = step(state, ROWS[:8])
        checkpoints.save(state)
        restored_state, _ = checkpoints.restore(state)
        assert int(restored_state.step) == 1
        same_arrays(restored_state, state)


@pytest.mark.quick("shards")
def test_steps_are_counted_through_other_options_and_measurements(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step, every=2, keep=9) as checkpoints:
        state, _ = train(step, state, 3, checkpoints)
        step = step.with_options(bucket_cap_mb=25)
        state, _ = train(step, state, 5, checkpoints)
        fddp.measure(step, state, [ROWS[:8]] * 3)
        state, _ = train(step, state, 7, checkpoints)
        checkpoints.save(state, now=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4", "6", "7"]
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        state, _ = checkpoints.restore(state)
        assert int(train(step, state, 8)[0].step) == 8 == step.training.number


@pytest.mark.quick("whole")
def test_saves_are_due_by_the_number_in_the_state(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    def saved(states: Iterator[fddp.TrainState], other: fddp.TrainStep, folder: str) -> list[int]:
        with fddp.Checkpoints(tmp_path / folder, other, every=10, keep=9) as checkpoints:
            return [int(state.step) for state in states if checkpoints.save(state)]

    def stepped(state: fddp.TrainState, count: int) -> Iterator[fddp.TrainState]:
        for _ in range(count):
            state, _ = step(state, ROWS[:8])
            yield state

    def scanned(state: fddp.TrainState) -> Iterator[fddp.TrainState]:
        run = jax.jit(lambda state: jax.lax.scan(step, state, np.stack([ROWS[:8]] * 5))[0])
        for _ in range(8):
            state = run(state)
            yield state

    def rolled_back(state: fddp.TrainState) -> Iterator[fddp.TrainState]:
        for earlier in stepped(state, 10):
            if int(earlier.step) == 7:
                state = jax.tree.map(jnp.copy, earlier)
            yield earlier
        yield from stepped(state, 14)

    step, state = make(group(1))
    other, _ = make(group(1))
    assert saved(stepped(state, 21), other, "another object") == [10, 20]
    assert saved(rolled_back(make(group(1))[1]), step, "rollback") == [10, 10, 20]
    step, state = make(group(1))
    step = step.with_options(schedule="fused")
    state, _ = step(state, ROWS[:8])
    assert saved(scanned(state._replace(step=state.step - 1)), step, "scan") == [10, 20, 30, 40]


def test_a_number_that_a_user_has_put_into_the_state_is_saved(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optimizer, group=group(2))
    state, _ = step(step.init(np.ones(3, np.float32)), ROWS[:8])
    state.opt_state.hyperparams["learning_rate"] = 0.01
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
        restored_state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
    assert restored_state.opt_state.hyperparams["learning_rate"] == np.float32(0.01)


def test_a_folder_is_where_it_was_opened(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    step, state = make(group(2))
    with fddp.Checkpoints("saved", step) as checkpoints:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoints.save(step(state, ROWS[:8])[0], now=True)
    assert (tmp_path / "saved" / "1" / "fddp.json").exists()


def test_an_older_checkpoint_is_not_removed_for_newer_ones(
    trained: Path, group: Callable[[int], fddp.Group], make: Make
):
    """The run went on from an older checkpoint: the one that it has just saved stays."""
    next((trained / "6").rglob("manifest.ocdbt")).unlink()
    step, state = make(group(2))
    with fddp.Checkpoints(trained, step, every=100, keep=1) as checkpoints:
        state, _ = checkpoints.restore(state)
        state, _ = step(state, ROWS[:8])
        checkpoints.save(state, now=True)
    assert sorted(path.name for path in trained.iterdir()) == ["5", "6"]


@pytest.mark.parametrize(
    "name",
    ["8.begun.0a1b2c3d.4", "8.begun.0a1b2c3d.4.replaced", "met.0a1b2c3d", "8.orbax-checkpoint-tmp"],
)
def test_what_a_killed_process_began_to_write_is_told_and_removed_later(
    trained: Path,
    group: Callable[[int], fddp.Group],
    make: Make,
    restored: Restored,
    name: str,
    capfd: pytest.CaptureFixture[str],
):
    unfinished = trained / name
    unfinished.mkdir()
    (unfinished / "leaves").write_bytes(b"half")
    _, state = restored(trained, group(2))
    assert ("not finished and are ignored: step [8]" in capfd.readouterr().err) == name.startswith(
        "8"
    )
    assert int(state.step) == 6 and unfinished.exists(), "another job may be writing it"
    step, state = make(group(2))
    with fddp.Checkpoints(trained, step, every=2) as checkpoints:
        state, _ = train(step, checkpoints.restore(state)[0], 8, checkpoints)
        checkpoints._writing.result()
        assert (unfinished / "leaves").read_bytes() == b"half", "it has just been written"
        message = (
            f"another job has written {name} in {trained} within 10 minutes: if it still runs, "
            f"give each job its own"
        )
        assert message in capfd.readouterr().err
        for path in (unfinished, unfinished / "leaves"):
            os.utime(path, (0, 0))
        train(step, state, 10, checkpoints)
    assert not unfinished.exists()
    assert "another job" not in capfd.readouterr().err


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
    trained: Path,
    group: Callable[[int], fddp.Group],
    capsys: pytest.CaptureFixture[str],
    restored: Restored,
):
    step, state = restored(trained, group(2))
    checkpoints = fddp.Checkpoints(trained, step, every=2)
    with full_disk():
        state, _ = checkpoints.restore(state)
        state, _ = train(step, state, 8, checkpoints)
        checkpoints._writing.result()
    assert "fddp: the checkpoint of step 8 could not be written" in capsys.readouterr().err
    assert sorted(path.name for path in trained.iterdir()) == ["2", "4", "6"]
    state, _ = train(step, state, 10, checkpoints)  # there is room again
    checkpoints.close()
    same_arrays(restored(trained, group(2))[1], state)


def test_if_the_last_could_not_be_written_closing_says_so(
    trained: Path, group: Callable[[int], fddp.Group], restored: Restored
):
    step, state = restored(trained, group(2))
    checkpoints = fddp.Checkpoints(trained, step, every=2)
    with full_disk():
        train(step, state, 8, checkpoints)
        with pytest.raises(Exception, match=r"(?i)too large|exhausted|File size"):
            checkpoints.close()


### Another training


def test_without_hooks_a_restored_training_reports_none_and_a_refused_one_nothing(
    group: Callable[[int], fddp.Group], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def opened(
        replicas: int, optimizer: optax.GradientTransformation
    ) -> tuple[fddp.TrainState, fddp.Checkpoints]:
        step = fddp.train_step(
            lambda w, x: jnp.mean((x - w) ** 2), optimizer, group=group(replicas)
        )
        return step.init(np.float32(1)), fddp.Checkpoints(tmp_path, step)

    state, checkpoints = opened(2, optax.sgd(0.1))
    with checkpoints:
        checkpoints.save(state, now=True)
    state, checkpoints = opened(4, optax.adam(0.1))
    with pytest.raises(ValueError, match="opt_state"):
        checkpoints.restore(state)
    assert "training goes on" not in capfd.readouterr().err
    state, checkpoints = opened(4, optax.sgd(0.1))
    checkpoints.restore(state)
    assert capfd.readouterr().err.endswith("it was on 2 replicas and is on 4.\n")


@pytest.mark.quick("shards")
def test_on_other_replicas_it_goes_on_without_what_hooks_remember(
    trained: Path,
    group: Callable[[int], fddp.Group],
    capfd: pytest.CaptureFixture[str],
    restored: Restored,
):
    _, elsewhere = restored(trained, group(2))
    step, state = restored(trained, group(4))
    printed = capfd.readouterr().err
    assert "it was on 2 replicas and is on 4" in printed
    assert ("; the memory of hooks starts again." in printed) == bool(
        jax.tree.leaves(state.hook_state)
    )
    original, elsewhere = (fddp.whole(side._replace(hook_state=())) for side in (state, elsewhere))
    assert bits(original) == bits(elsewhere)
    assert not any(np.any(memory) for memory in jax.tree.leaves(state.hook_state))
    step(state, ROWS[:8])


def test_a_checkpoint_of_another_model_is_refused(
    trained: Path, group: Callable[[int], fddp.Group]
):
    step = fddp.train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.adam(0.1), group=group(2))
    message = (
        r"of step 6 is of another training: it has params/b float32\[5\]; (?s:.*)lacks params/w "
        r"float32\[3, 4\]"
    )
    with fddp.Checkpoints(trained, step) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(step.init({"w": np.ones((3, 4), np.float32)}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"every": 0}, "every must be"), ({"keep": 0}, "keep must be"), ({"every": 2.5}, "2.5")],
)
def test_what_cannot_be_meant_is_refused(
    group: Any, tmp_path: Path, arguments: dict[str, Any], message: str, make: Make
):
    with pytest.raises(ValueError, match=message):
        fddp.Checkpoints(tmp_path, make(group(1))[0], **arguments)
    with pytest.raises(TypeError, match=r"step must be a step from fddp\.train_step"):
        fddp.Checkpoints(tmp_path, lambda state, batch: state)  # type: ignore


def test_a_place_that_json_cannot_hold_is_refused(
    group: Callable[[int], fddp.Group], tmp_path: Path, make: Make
):
    step, state = make(group(1))
    with (
        fddp.Checkpoints(tmp_path, step) as checkpoints,
        pytest.raises(TypeError, match="not JSON"),
    ):
        checkpoints.save(state, {1, 2})  # which is not due


def test_two_leaves_of_one_name_are_not_saved_as_one(
    group: Callable[[int], fddp.Group], tmp_path: Path
):
    step = fddp.train_step(
        lambda p, x: jnp.mean(x) * p["a/b"] * p["a"]["b"], optax.sgd(0.1), group=group(1)
    )
    state = step.init({"a/b": np.ones(()), "a": {"b": np.ones(())}})
    with (
        fddp.Checkpoints(tmp_path, step) as checkpoints,
        pytest.raises(ValueError, match="are called 'params/a/b'"),
    ):
        checkpoints.save(state)  # which is not due


### Where arrays lie


def test_parts_along_other_axes_come_back_where_they_lay(tmp_path: Path):
    devices = np.array(jax.devices()[:4])
    saved: Any = None
    for mesh in (
        Mesh(devices.reshape(2, 2), ("replica", "model")),
        Mesh(devices.reshape(1, 4), ("replica", "model")),
    ):
        step = fddp.train_step(
            lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.1), group=fddp.mesh_group(mesh)
        )
        first = jax.device_put(
            np.ones((3, 8), np.float32), NamedSharding(mesh, PartitionSpec(None, "model"))
        )
        like = step.init(first)
        with fddp.Checkpoints(tmp_path, step) as checkpoints:
            restored_state, _ = checkpoints.restore(like)
            if restored_state is like:
                state, _ = step(like, ROWS[:8])
                assert checkpoints.save(state, now=True)
                saved = bits(state)
                with pytest.raises(
                    ValueError, match=r"a form does not say where the parts of .* lie along 'model'"
                ):
                    checkpoints.restore(step.shapes(first))
            else:
                assert bits(restored_state) == saved
                assert restored_state.params.sharding == first.sharding


def test_a_form_has_no_memory_for_hooks_of_other_replicas(
    trained: Path, group: Callable[[int], fddp.Group], restored: Restored, make: Make
):
    step, state = make(group(4))
    form = step.shapes(
        {
            "w": np.ones((3, 5), np.float32),
            "b": np.zeros(5, np.float32),
            "empty": np.zeros((0, 2), np.float32),
        },
        model_state=np.zeros(3, np.float32),
        rng=jax.random.key(1),
    )
    with fddp.Checkpoints(trained, step) as checkpoints:
        if jax.tree.leaves(state.hook_state):
            with pytest.raises(
                ValueError, match="is of 2 replicas and these are 4: the memory of the hook"
            ):
                checkpoints.restore(form)
        else:
            same_arrays(checkpoints.restore(form)[0], restored(trained, group(4))[1])
