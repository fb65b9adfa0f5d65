"""Claims about steps that return before their last sums are back: on paper, in training, for who
holds the state."""

import copy
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tied_net import TOKENS, plain, tied_net, tied_params
from truth import by_plain_jax

import fddp
from bench.steady import steady_seconds
from fddp.comm import Journal, Lane, poll
from fddp.hooks import Reduction
from fddp.hooks.reductions import Asks
from fddp.jax_internals import with_configuration
from fddp.schedules.message_order import trailed
from fddp.schedules.tasks import BYTES, Communicate, Compute, Task, TaskList, Value

Groups = Callable[[int], fddp.Group]


def layers(n: int, *, asks: int | None = None) -> TaskList:
    """A net of n layers with a bucket each: the last one's gradient is ready first and needed
    last."""
    x, y = ([Value(kind, k) for k in range(n + 1)] for kind in "xy")
    params = [Value("state", path=f"params/{k}") for k in range(n)]
    tasks: list[Task] = [Compute(f"forward {k}", (params[k], x[k]), (x[k + 1],)) for k in range(n)]
    message, total = ([Value(kind, k) for k in range(n)] for kind in ("message", "sum"))
    for number, k in enumerate(reversed(range(n))):
        asked = (total[asks],) if asks is not None and number > asks else ()
        told = (BYTES,) if number == n - 1 else ()
        how = Reduction(asks=Asks(asks or 0, (0,)) if asked else None)
        tasks += [
            Compute(
                f"backward {k}", (y[k + 1] if number else x[n], params[k]), (y[k], message[number])
            )
        ]
        tasks += [
            Communicate(f"bucket {number}", (message[number], *asked), (total[number], *told), how)
        ]
    weight = Value("weight")
    for number, k in enumerate(reversed(range(n))):
        reads = total[number], params[k], *((weight,) if number else ())
        others = () if number else (weight, Value("result", path="1/loss"))
        writes = Value("result", path=f"0/params/{k}"), *others
        tasks += [Compute(f"update {number}", reads, writes, kind="update")]
    return TaskList(tuple(tasks), lambda *given: {}, lambda values: ((), ()))


def uses(n: int) -> dict[str, int]:
    """Bucket k is of layer n - 1 - k; the first one carries the loss."""
    return {f"bucket {k}": n - 1 - k for k in range(1, n)}


def order(listed: TaskList) -> list[int]:
    return [int(task.name.split()[1]) for task in listed.messages]


### On paper


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        (4, [0, 2, 3, 1]),
        (8, [0, 2, 3, 4, 6, 7, 5, 1]),
        (13, [0, 1, 3, 4, 5, 7, 8, 9, 11, 12, 10, 6, 2]),
    ],
)
def test_one_message_of_four_is_put_off_and_leaves_by_first_use(n, expected):
    assert order(trailed(layers(n), uses(n))) == expected


def test_updates_come_in_the_order_of_sums_and_the_last_message_tells_the_bytes():
    listed = trailed(layers(8), uses(8))
    updates = [task.name for task in listed.tasks if task.kind == "update"]
    assert updates == [f"update {k}" for k in order(listed)]
    assert [BYTES in task.writes for task in listed.messages] == [False] * 7 + [True]
    written = set[str]()
    for task in listed.tasks:
        if isinstance(task, Communicate):
            assert task.reads[0] in written, "it is made before it leaves"
        written.update(task.writes)


def test_a_message_that_others_ask_and_those_that_ask_stay_where_they_are():
    assert order(trailed(layers(8, asks=5), uses(8))) == [0, 2, 3, 4, 5, 6, 7, 1]
    assert order(trailed(layers(8, asks=0), uses(8))) == list(range(8))


def test_the_order_is_that_of_the_uses_that_all_ranks_share():
    assert order(trailed(layers(8), uses(8) | {"bucket 1": 0})) == [0, 2, 3, 4, 6, 7, 1, 5]


def test_neither_the_carrier_nor_gradients_that_are_returned_are_put_off():
    told = {name: use for name, use in uses(4).items() if name != "bucket 1"}  # it carries the loss
    assert order(trailed(layers(4), told)) == [0, 1, 2, 3]
    listed = layers(8)
    kept = [
        task._replace(reads=tuple(x for x in task.reads if "state" not in x))
        for task in listed.tasks
    ]
    assert order(trailed(listed._replace(tasks=tuple(kept)), uses(8))) == list(range(8))


def test_a_put_off_sum_lies_under_the_next_forward_pass():
    """Four layers, by hand: a forward second and two of backward each, messages of three.

    Messages are ready at 6, 8, 10 and 12, and leave in the order 0, 2, 3, 1: at 6, 10, 13 and 16.
    The next forward pass needs 3 (layer 0) first, and begins at 16; layer 2 waits from 18 to 19 for
    message 1. So message 0 is ready anew at 23: 17 seconds a step, where all that wait for all take
    18.
    """
    took = {
        f"{word} {k}": time
        for word, time in (("forward", 1.0), ("backward", 2.0), ("bucket", 3.0))
        for k in range(4)
    }
    assert steady_seconds(
        trailed(layers(4), uses(4)).tasks, took, attrgetter("replaces")
    ) == pytest.approx(17.0)
    assert steady_seconds(layers(4).tasks, took) == pytest.approx(18.0)


### In training

PARAMS = tied_params(6)


def batch(k: int) -> Any:
    return np.roll(TOKENS, k, axis=0)


def assert_close(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, expected
    )


def trainer(replicas: fddp.Group, **options: Any) -> fddp.TrainStep:
    given: dict[str, Any] = {"schedule": "eager", "bucket_cap_mb": 0} | options
    return fddp.train_step(tied_net, optax.adam(0.05), group=replicas, **given)


class Wire:
    """A transport of one replica whose sums come back when they are let."""

    def __init__(self, replicas: fddp.Group) -> None:
        self.let, self.most, self.sent, self.seconds, self.broken = math.inf, 0, 0, 0.0, False
        self._now, self._own, self._changed = 0, replicas.transport, threading.Condition()
        lanes = self._own, self._own._replace(all_reduce=self.all_reduce)
        self.group = replace(replicas, clone=lambda count: lanes, journal=Journal(), lane=Lane())

    def all_reduce(self, x: jax.Array) -> jax.Array:
        self._now += 1
        self.most = max(self.most, self._now)
        with self._changed:
            assert self._changed.wait_for(lambda: self.let > 0, 60)
            self.let -= 1
        time.sleep(self.seconds)
        self._now, self.sent = self._now - 1, self.sent + 1
        if self.broken:
            raise ArithmeticError("the wire is broken")
        return self._own.all_reduce(x)

    @contextmanager
    def letting(self, messages: int) -> Iterator[None]:
        """So many come back, and those behind them at the end."""
        self.let = messages
        try:
            yield
        finally:
            with self._changed:
                self.let = math.inf
                self._changed.notify_all()


def begun(wire: Wire, **options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A step that is compiled, and a state of which all is there."""
    step = trainer(wire.group, **options)
    state, _ = step(step.init(PARAMS), batch(0))
    return step, jax.block_until_ready(state)


# What needs numbers, and waits for them.
LOOKS: dict[str, Callable[[fddp.TrainState], Any]] = {
    "NumPy": lambda state: np.asarray(late(state)),
    "NumPy's functions": lambda state: np.sum(late(state)),
    "jnp": lambda state: jnp.sum(late(state)),
    "lax": lambda state: jax.lax.neg(late(state)),
    "a number": lambda state: float(late(state).sum()),
    "a method": lambda state: late(state).at[0].set(0.0),
    "an operator": lambda state: 2 - late(state),
    "of another array": lambda state: jnp.ones_like(PARAMS["skipped"]) * late(state),
    "of NumPy's array": lambda state: np.ones_like(PARAMS["skipped"]) * late(state),
    "an index": lambda state: late(state)[0],
    "rows": lambda state: [*late(state)],
    "where it lies": lambda state: late(state).sharding,
    "all in NumPy": lambda state: jax.tree.map(np.asarray, state),
    "brought here": jax.device_get,
    "laid anew": jax.device_put,
    "a norm": lambda state: optax.tree.norm(state.params),
    "updates": lambda state: optax.apply_updates(state.params, state.params),
    "given to a program": jax.jit(lambda state: state.params["skipped"]),
    "in a closure": lambda state: jax.jit(lambda: 2 * late(state))(),
    "derived": lambda state: jax.grad(lambda params: jnp.sum(params["skipped"] ** 2))(state.params),
    "compiled": lambda state: jax.jit(lambda x: x).lower(state.params).compile()(state.params),
    "waited for": jax.block_until_ready,
    "printed": repr,
    "copied whole": copy.deepcopy,
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
    "put together": fddp.whole,
    "evaluated": lambda state: fddp.evaluate(tied_net, state, [TOKENS]),
}

# What any tuple does, whatever it holds.
HOLDS: dict[str, Callable[[fddp.TrainState], Any]] = {
    "a field": lambda state: state.params is state[1],
    "unpacked": lambda state: [*state][1] is state.params,
    "added": lambda state: (state + ())[1] is state.params,  # noqa: RUF005
    "changed": lambda state: state._replace(rng=None).params is state.params,
    "copied": lambda state: copy.copy(state).params is state.params,
    "leaves": lambda state: late(state) in map(Same, jax.tree.leaves(state)),
    "equal to itself": lambda state: state == fddp.TrainState(*state),
    "in a list": lambda state: state in [state],
    "its place": lambda state: state.index(state.step) == 0,
    "in": lambda state: state.step in state,
    "mapped": lambda state: jax.tree.map(lambda x, y: x is y, state, state).params["skipped"],
    "shapes": lambda state: late(state).shape == PARAMS["skipped"].shape,
    "sizes": lambda state: late(state).size == PARAMS["skipped"].size,
    "an array": lambda state: isinstance(late(state), jax.Array),
    "a promise": lambda state: isinstance(late(state), fddp.Promise) and not late(state).done(),
}


class Same:
    """Equal to the same object alone."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return self.x is other


def late(state: fddp.TrainState) -> Any:
    """A leaf whose sum comes last."""
    return state.params["skipped"]


@pytest.mark.steps
def test_a_step_returns_before_its_sums_are_back_and_whoever_looks_waits(group: Groups, x64: None):
    wire = Wire(group(1))
    step, state = begun(wire)
    looked = list[str]()
    with wire.letting(1):
        state, info = step(state, batch(1))
        assert np.isfinite(info.loss) and int(np.sum(info.sent)) == 0, "it has returned"
        assert int(state.step) == 2, "of this nothing is on its way"

        assert {name for name, holds in HOLDS.items() if not holds(state)} == set()
        with pytest.raises(TypeError, match="unhashable"):
            hash(state)

        def look(name: str) -> None:
            LOOKS[name](state)
            looked.append(name)

        threads = [threading.Thread(target=with_configuration(look), args=[name]) for name in LOOKS]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert not looked
    for thread in threads:
        thread.join(60)
    assert sorted(looked) == sorted(LOOKS)
    assert isinstance(late(pickle.loads(pickle.dumps(state))), type(jnp.zeros(())))
    assert late(state).result() is late(fddp.whole(state))
    assert_close(state.params, plain(PARAMS, 2))
    assert jax.tree.structure(state) == jax.tree.structure(step.init(PARAMS))


@pytest.mark.parametrize("schedule", ["fused", "eager"])
@pytest.mark.steps
def test_a_state_is_a_tuple_as_others_are(group: Groups, x64: None, schedule: Any):
    wire = Wire(group(1))
    wire.seconds = 0.02
    step = trainer(wire.group, schedule=schedule, donate=False)
    first, _ = step(step.init(PARAMS), batch(0))
    second, _ = step(first, batch(1))
    assert second == second._replace() and second in (first, second)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(first.params == second.params)
    with pytest.raises(TypeError, match="unhashable"):
        hash(second)
    changes = jax.tree.map(lambda new, old: jnp.max(jnp.abs(new - old)), second, first)
    assert int(changes.step) == 1 and late(changes) > 0
    numbers = jax.tree.map(np.asarray, second)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, numbers, second)))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, second, numbers)))


@pytest.mark.steps
def test_a_checkpoint_holds_what_was_on_its_way(group: Groups, x64: None, tmp_path: Path):
    wire = Wire(group(1))
    wire.seconds = 0.02
    step, state = begun(wire)
    state, _ = step(state, batch(1))
    assert isinstance(late(state), fddp.Promise)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        assert checkpoints.save(state, now=True)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        restored, _ = checkpoints.restore(step.shapes(PARAMS))
    assert_close(restored.params, plain(PARAMS, 2))


@pytest.mark.steps
def test_the_next_forward_pass_begins_before_the_last_sum_is_back(
    group: Groups, x64: None, monkeypatch
):
    wire = Wire(group(1))
    step, state = begun(wire)
    jax.block_until_ready(state)
    said, messages = list[str](), len(step.plan.buckets)
    monkeypatch.setattr(wire.group.journal, "say", said.append)
    with wire.letting(messages - 1):
        state, _ = step(state, batch(1))
        said.clear()
        ended = list[Any]()
        thread = threading.Thread(
            target=with_configuration(lambda: ended.append(step(state, batch(2))))
        )
        thread.start()
        assert poll(lambda: "stage 3" in said, 60) and not ended
    thread.join(60)
    ((state, _),) = ended
    assert_close(state.params, plain(PARAMS, 3))


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.steps
def test_replicas_of_one_process_are_trained_as_one_is(group: Groups, x64: None, n: int):
    step = trainer(group(n))
    state = step.init(PARAMS)
    for k in range(6):
        state, _ = step(state, batch(k))
    assert_close(state.params, plain(PARAMS, 6))


@pytest.mark.steps
def test_what_is_used_first_and_ready_last_is_never_trained_on_stale(group: Groups, x64: None):
    wire = Wire(group(1))
    wire.seconds = 0.02
    step, state = begun(wire)
    returned = list[bool]()
    for k in range(1, 6):
        state, _ = step(state, batch(k))
        returned.append(wire.sent < (k + 1) * len(step.plan.buckets))
    assert all(returned), "each returned before its last sum was back"
    assert_close(state.params, plain(PARAMS, 6))


@pytest.mark.steps
def test_a_step_that_is_given_another_state_trains_that_one(group: Groups, x64: None):
    """An earlier one, a copy, one that was changed."""
    wire = Wire(group(1))
    wire.seconds = 0.02
    step = trainer(wire.group, donate=False)
    first = step.init(PARAMS)
    second, _ = step(first, batch(0))
    third, _ = step(second, batch(1))
    again, _ = step(first, batch(0))  # third was under way
    copied, _ = step(jax.tree.map(jnp.copy, again), batch(1))
    jax.tree.map(np.testing.assert_array_equal, copied, third)
    halved = third._replace(params=jax.tree.map(lambda x: x / 2, third.params))
    got, info = step(halved, TOKENS)
    np.testing.assert_allclose(info.loss, tied_net(halved.params, TOKENS), rtol=1e-12)
    assert int(got.step) == 3


@pytest.mark.quick("eager", "after")
@pytest.mark.parametrize("schedule", ["fused", "staged", "after", "eager"])
@pytest.mark.steps
def test_any_other_step_may_go_on_with_such_a_state(group: Groups, x64: None, schedule: Any):
    wire = Wire(group(1))
    step, state = begun(wire)
    with wire.letting(1):
        state, _ = step(state, batch(1))
    other = fddp.train_step(tied_net, optax.adam(0.05), group=group(1), schedule=schedule)
    for k in (2, 3):
        state, _ = other(state, batch(k))
    assert_close(state.params, plain(PARAMS, 4))


@pytest.mark.steps
def test_a_state_that_a_step_will_write_to_is_used_up_at_once(group: Groups):
    wire = Wire(group(1))
    step, state = begun(wire)
    for _ in range(2):  # of arrays at first, and of promises then
        with wire.letting(1):
            later, _ = step(state, batch(1))
            with pytest.raises(ValueError, match=r"this state is used up.*donate=False"):
                step(state, batch(1))
        jax.block_until_ready(later)
        state = later
    later, _ = step(state, batch(1))
    jax.block_until_ready(later)
    step(later, batch(2))
    with pytest.raises(ValueError, match=r"this state is used up.*donate=False"):
        step(state, batch(1))


@pytest.mark.steps
def test_an_error_between_two_steps_loses_no_update(group: Groups, x64: None):
    wire = Wire(group(1))
    step, state = begun(wire)
    with pytest.raises(ArithmeticError, match="the user's own"), wire.letting(1):
        state, _ = step(state, batch(1))
        raise ArithmeticError("the user's own")
    with pytest.raises(ValueError, match="rows"):
        step(state, {"rows": ()})
    state, _ = step.no_sync(state, batch(2))
    state, _ = step(state, batch(2))
    assert_close(state.params, plain(PARAMS, 3))


@pytest.mark.steps
def test_a_sum_that_fails_is_an_error_for_whoever_looks_and_for_the_next_step(group: Groups):
    wire = Wire(group(1))
    step, state = begun(wire, donate=False)
    with wire.letting(1):
        late, _ = step(state, batch(1))
        wire.broken = True
    with pytest.raises(ArithmeticError, match="the wire is broken"):
        print(late.params)
    wire.broken = False
    with pytest.raises(ArithmeticError, match="the wire is broken"):
        step(late, batch(2))
    again, _ = step(state, batch(1))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(again.params))


def waits_for_all(wire: Wire, call: Callable[[], Any]) -> list[Any]:
    """Makes a call while nothing but the first sum comes back; what it returned or raised when all
    were let."""
    ended = list[Any]()

    def run() -> None:
        try:
            ended.append(call())
        except ArithmeticError as error:
            ended.append(error)

    thread = threading.Thread(target=with_configuration(run))
    with wire.letting(1):
        thread.start()
        time.sleep(0.5)
        assert not ended
    thread.join(60)
    return ended


@pytest.mark.steps
def test_an_error_in_a_stage_shows_when_nothing_is_under_way_any_more(group: Groups, monkeypatch):
    wire, told = Wire(group(1)), list[str]()
    step, state = begun(wire, donate=False)
    last = max(
        int(task.name.split()[1])
        for task in step.tasks(state, TOKENS).tasks
        if task.kind == "compute"
    )

    def say(doing: str) -> None:
        told.append(doing)
        if doing == f"stage {last}" and told.count(doing) == 1:
            raise ArithmeticError("on purpose")

    monkeypatch.setattr(wire.group.journal, "say", say)
    (error,) = waits_for_all(wire, lambda: step(state, TOKENS))
    assert isinstance(error, ArithmeticError) and str(error) == "on purpose"
    jax.block_until_ready(step(state, TOKENS))
    assert wire.most == 1


@pytest.mark.steps
def test_without_a_communicator_of_its_own_a_step_leaves_nothing(group: Groups):
    wire = Wire(group(1))
    own = wire.group.transport._replace(all_reduce=wire.all_reduce)
    step = trainer(replace(wire.group, transport=own, clone=lambda count: (own,)))
    state, _ = step(step.init(PARAMS), batch(0))
    waits_for_all(wire, lambda: step(state, batch(1)))
    assert wire.most == 1


@pytest.mark.steps
def test_where_an_update_needs_all_sums_the_next_forward_pass_waits_for_all(
    group: Groups, x64: None, monkeypatch
):
    """A clip by the global norm."""
    optimizer, wire = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)), Wire(group(1))
    step = fddp.train_step(tied_net, optimizer, group=wire.group, schedule="eager", bucket_cap_mb=0)
    state = step.init(PARAMS)
    for k in range(3):
        state, _ = step(state, batch(k))
    expected = by_plain_jax(tied_net, optimizer, PARAMS, map(batch, range(3))).params
    assert_close(state.params, expected)
    jax.block_until_ready(state)
    said, messages = list[str](), len(step.plan.buckets)
    with wire.letting(messages - 1):
        state, _ = step(state, batch(3))
        monkeypatch.setattr(wire.group.journal, "say", said.append)
        thread = threading.Thread(target=with_configuration(lambda: step(state, batch(4))))
        thread.start()
        time.sleep(0.5)
        assert "stage 1" not in said, "the first stage that reads a parameter"
    thread.join(60)
    assert "stage 1" in said


@pytest.mark.steps
def test_steps_that_are_local_for_a_while_promise_what_is_late_as_others_do(
    group: Groups, x64: None
):
    wire = Wire(group(1))
    optimizer = fddp.local_steps(optax.sgd(0.05), every=2)
    step = fddp.train_step(tied_net, optimizer, group=wire.group, schedule="eager", bucket_cap_mb=0)
    state = step.init(PARAMS)
    for k in range(6):
        state, _ = step(state, batch(k))
        assert int(state.step) == k + 1
    expected = by_plain_jax(tied_net, optax.sgd(0.05), PARAMS, map(batch, range(6))).params
    assert_close(fddp.whole(state.params, group=wire.group), expected)


@pytest.mark.steps
def test_gradients_are_returned_when_all_are_there(group: Groups, x64: None):
    f = fddp.value_and_grad(tied_net, group=Wire(group(1)).group, schedule="eager", bucket_cap_mb=0)
    for k in range(3):
        assert_close(f(PARAMS, batch(k)), jax.value_and_grad(tied_net)(PARAMS, batch(k)))


@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_with_shards_an_eager_step_is_a_staged_one(group: Groups, shard: Any):
    eager, staged = (trainer(group(2), shard=shard, schedule=name) for name in ("eager", "staged"))
    form = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    lists = [str(step.tasks(step.shapes(PARAMS), form)) for step in (eager, staged)]
    assert lists[0] == lists[1]
