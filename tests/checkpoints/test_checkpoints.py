"""Training resumes from checkpoints as if it had not ended."""

from collections.abc import Callable, Iterator
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

Groups: TypeAlias = Callable[[int], fddp.Group]
# A training of one kind: makes its step over a group, and its first state.
Make: TypeAlias = Callable[[fddp.Group], tuple[fddp.TrainStep, fddp.TrainState]]


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
    "whole": lambda group: first(group, hook=fddp.hooks.topk(0.4)),  # with a residual
    "shards": lambda group: first(group, shard="state"),
    "local buffers": lambda group: first(group, broadcast_buffers=False),
    "shards and local buffers": lambda group: first(group, shard="state", broadcast_buffers=False),
}


def restored(step: fddp.TrainStep, folder: Path, like: fddp.TrainState) -> fddp.TrainState:
    with fddp.Checkpoints(folder, step) as checkpoints:
        return checkpoints.restore(like)[0]


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


def saved(folder: Path) -> list[str]:
    """The numbers of the checkpoints in a folder."""
    return sorted(path.name for path in folder.iterdir() if path.name.isdecimal())


@pytest.mark.quick("shards", "local buffers")
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_that_ended_goes_on_bit_for_bit(group: Groups, tmp_path: Path, kind: str):
    make = KINDS[kind]
    calm, losses = train(*make(group(2)), 12)
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step, every=2) as checkpoints:
        assert checkpoints.restore(state) == (state, None)
        train(step, state, 7, checkpoints)
    step, state = make(group(2))
    state = restored(step, tmp_path, state)
    assert int(state.step) == 6
    memory = jax.tree.leaves(state.hook_state)
    assert any(map(np.any, memory)) == bool(memory), "the residual is not zero"
    state, later = train(step, state, 12)
    assert later == losses[6:]
    same_arrays(state, calm)


@pytest.mark.quick("shards", "whole")
@pytest.mark.parametrize("kind", KINDS)
def test_on_other_replicas_local_values_are_those_of_the_new_state(
    group: Groups, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]
):
    make = KINDS[kind]
    step, state = make(group(2))
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        state, _ = train(step, state, 3)
        checkpoints.save(state, now=True)
    step, new = make(group(4))
    capfd.readouterr()
    goes_on = restored(step, tmp_path, new)
    local = {"hook_state": kind == "whole", "model_state": "local" in kind}
    names = {"hook_state": "the memory of hooks", "model_state": "the buffers of each replica"}
    line = "".join(f"; not restored: {names[field]}" for field, x in local.items() if x)
    assert f"it was on 2 replicas and is on 4{line}.\n" in capfd.readouterr().err
    lost = [field for field, is_lost in local.items() if is_lost]
    for field in lost:
        same_arrays(getattr(goes_on, field), getattr(new, field))
    without = dict.fromkeys(lost)
    assert bits(fddp.whole(goes_on)._replace(**without)) == bits(
        fddp.whole(state)._replace(**without)
    )
    form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), new)
    if lost:
        with pytest.raises(
            ValueError, match=r"cannot be restored, so give a state from step\.init"
        ):
            restored(step, tmp_path, form)
    else:
        same_arrays(restored(step, tmp_path, form), goes_on)
    step(goes_on, ROWS[:8])


def test_a_state_is_saved_after_every_so_many_steps_and_when_asked(
    group: Groups, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    step, state = first(group(1))
    with fddp.Checkpoints(tmp_path, step, every=3, keep=2) as checkpoints:
        numbers = list[int]()
        for number in range(1, 9):
            state, _ = step(state, ROWS[:8])
            if checkpoints.save(state, {"row": number}, now=number == 8):
                numbers.append(number)
        assert not checkpoints.save(state, now=True), "this one is saved already"
    assert numbers == [3, 6, 8]
    assert saved(tmp_path) == ["6", "8"]
    step, fresh = first(group(1))
    with fddp.Checkpoints(tmp_path, step, every=3) as checkpoints:
        restored_state, place = checkpoints.restore(fresh)
        same_arrays(restored_state, state)
        assert place == {"row": 8}
        restored_state, _ = step(restored_state, ROWS[:8])
        assert checkpoints.save(restored_state), "the ninth"
    assert capfd.readouterr().err == f"fddp: training goes on from step 8, from {tmp_path}.\n"


def test_nothing_is_saved_while_gradients_are_pending(
    group: Groups, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    step, state = first(group(2))
    with fddp.Checkpoints(tmp_path, step, every=1) as checkpoints:
        state, _ = step.no_sync(state, ROWS[:8])
        assert not checkpoints.save(state)
        assert "nothing is saved" not in capfd.readouterr().err
        assert not checkpoints.save(state, now=True)
        assert "nothing is saved at step 0, because gradients are pending" in capfd.readouterr().err
        state, _ = step(state, ROWS[:8])
        assert checkpoints.save(state)
        pending, _ = step.no_sync(jax.tree.map(jnp.copy, state), ROWS[8:16])
        same_arrays(checkpoints.restore(pending)[0], state)


def test_restoring_waits_for_what_is_being_written(group: Groups, tmp_path: Path):
    step, state = first(group(2))
    with fddp.Checkpoints(tmp_path, step, every=1) as checkpoints:
        state, _ = step(state, ROWS[:8])
        checkpoints.save(state)
        restored_state, _ = checkpoints.restore(state)
        assert int(restored_state.step) == 1
        same_arrays(restored_state, state)


def test_steps_are_counted_through_other_options_and_measurements(group: Groups, tmp_path: Path):
    step, state = first(group(2))
    with fddp.Checkpoints(tmp_path, step, every=2, keep=9) as checkpoints:
        state, _ = train(step, state, 3, checkpoints)
        step = step.with_options(bucket_cap_mb=25)
        state, _ = train(step, state, 5, checkpoints)
        fddp.measure(step, state, [ROWS[:8]] * 3)
        state, _ = train(step, state, 7, checkpoints)
        checkpoints.save(state, now=True)
    assert saved(tmp_path) == ["2", "4", "6", "7"]
    step, state = first(group(2))
    state = restored(step, tmp_path, state)
    assert int(train(step, state, 8)[0].step) == 8 == step.training.number


def test_saves_are_due_by_the_number_in_the_state(group: Groups, tmp_path: Path):
    def due(states: Iterator[fddp.TrainState], other: fddp.TrainStep, folder: str) -> list[int]:
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

    step, state = first(group(1))
    other, _ = first(group(1))
    assert due(stepped(state, 21), other, "another object") == [10, 20]
    assert due(rolled_back(first(group(1))[1]), step, "rollback") == [10, 10, 20]
    step, state = first(group(1))
    state, _ = step(state, ROWS[:8])
    assert due(scanned(state._replace(step=state.step - 1)), step, "scan") == [10, 20, 30, 40]


def test_a_number_that_a_user_has_put_into_the_state_is_saved(group: Groups, tmp_path: Path):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    step = fddp.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optimizer, group=group(2))
    state, _ = step(step.init(np.ones(3, np.float32)), ROWS[:8])
    state.opt_state.hyperparams["learning_rate"] = 0.01
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
        restored_state, _ = checkpoints.restore(step.init(np.ones(3, np.float32)))
    assert restored_state.opt_state.hyperparams["learning_rate"] == np.float32(0.01)


def test_parts_along_other_axes_come_back_where_they_lay(tmp_path: Path):
    devices = np.array(jax.devices()[:4])
    expected: Any = None
    for mesh in (
        Mesh(devices.reshape(2, 2), ("replica", "model")),
        Mesh(devices.reshape(1, 4), ("replica", "model")),
    ):
        step = fddp.train_step(
            lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(0.1), group=fddp.mesh_group(mesh)
        )
        params = jax.device_put(
            np.ones((3, 8), np.float32), NamedSharding(mesh, PartitionSpec(None, "model"))
        )
        like = step.init(params)
        with fddp.Checkpoints(tmp_path, step) as checkpoints:
            restored_state, _ = checkpoints.restore(like)
            if restored_state is like:
                state, _ = step(like, ROWS[:8])
                assert checkpoints.save(state, now=True)
                expected = bits(state)
                with pytest.raises(
                    ValueError, match=r"a form does not say where the parts of .* lie along 'model'"
                ):
                    checkpoints.restore(step.shapes(params))
            else:
                assert bits(restored_state) == expected
                assert restored_state.params.sharding == params.sharding


@pytest.mark.parametrize(
    "x", [jnp.uint4, jnp.bfloat16, jnp.float8_e5m2, jnp.bool_, jnp.complex64], ids=str
)
def test_buffers_of_any_dtype_come_back_bit_for_bit(group: Groups, tmp_path: Path, x: Any):
    step = fddp.train_step(
        lambda w, x, model_state: (jnp.mean((x @ w) ** 2), model_state),
        optax.sgd(0.1),
        group=group(2),
    )
    buffer = (jnp.arange(16) % 16).astype(x).reshape(2, 8)
    state = step.init(np.ones(3, np.float32), model_state=buffer)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
        like = step.init(np.ones(3, np.float32), model_state=jnp.zeros_like(buffer))
        got = checkpoints.restore(like)[0].model_state
    assert got.dtype == x and bits(got) == bits(buffer)


### Misuses


def test_a_refused_checkpoint_is_of_another_training_and_reports_nothing(
    group: Groups, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    step, state = first(group(2))
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(step(state, ROWS[:8])[0], now=True)
    step = fddp.train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.adam(0.1), group=group(2))
    message = (
        r"of step 1 is of another training: it has params/b float32\[5\]; (?s:.*)lacks params/w "
        r"float32\[3, 4\]"
    )
    with pytest.raises(ValueError, match=message):
        restored(step, tmp_path, step.init({"w": np.ones((3, 4), np.float32)}))
    assert "training goes on" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"every": 0}, "every must be"), ({"keep": 0}, "keep must be"), ({"every": 2.5}, "2.5")],
)
def test_what_cannot_be_meant_is_refused(
    group: Groups, tmp_path: Path, arguments: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        fddp.Checkpoints(tmp_path, first(group(1))[0], **arguments)
    with pytest.raises(TypeError, match=r"step must be a step, from fddp\.train_step"):
        fddp.Checkpoints(tmp_path, lambda state, batch: state)  # type: ignore


def test_what_cannot_be_saved_is_refused_at_the_first_call(group: Groups, tmp_path: Path):
    step, state = first(group(1))
    checkpoints = fddp.Checkpoints(tmp_path, step)
    with pytest.raises(TypeError, match="not JSON"):
        checkpoints.save(state, {1, 2})
    step = fddp.train_step(
        lambda p, x: jnp.mean(x) * p["a/b"] * p["a"]["b"], optax.sgd(0.1), group=group(1)
    )
    state = step.init({"a/b": np.ones(()), "a": {"b": np.ones(())}})
    checkpoints = fddp.Checkpoints(tmp_path, step)
    with pytest.raises(ValueError, match="are called 'params/a/b'"):
        checkpoints.save(state)
