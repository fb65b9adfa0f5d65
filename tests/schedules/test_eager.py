"""Steps that return before their last sums arrive: on paper, in training, and for owners of the
state."""

import copy
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from fddp.comm import Journal, Lane
from fddp.hooks import Reduction
from fddp.hooks.reductions import Asks
from fddp.jax_internals import with_configuration
from fddp.runtime.watching import poll
from fddp.schedules.message_order import trailed
from fddp.schedules.tasks import Communicate, Compute, Task, TaskList
from fddp.schedules.values import BYTES, Value

Groups = Callable[[int], fddp.Group]


def layers(n: int, *, asks: int | None = None) -> TaskList:
    """A net of n layers with a bucket each: the last one's gradient is ready first and needed
    last."""
    x, y = ([Value(kind, k) for k in range(n + 1)] for kind in "xy")
    params = [Value("state", path=f"params/{k}") for k in range(n)]
    tasks: list[Task] = [Compute(f"forward {k}", (params[k], x[k]), (x[k + 1],)) for k in range(n)]
    message, total = ([Value(kind, k) for k in range(n)] for kind in ("message", "sum"))
    for number, k in enumerate(reversed(range(n))):
        requests = (total[asks],) if asks is not None and number > asks else ()
        nbytes = (BYTES,) if number == n - 1 else ()
        reduction = Reduction(asks=Asks(asks or 0, (0,)) if requests else None)
        tasks += [
            Compute(
                f"backward {k}", (y[k + 1] if number else x[n], params[k]), (y[k], message[number])
            )
        ]
        tasks += [
            Communicate(
                f"bucket {number}",
                (message[number], *requests),
                (total[number], *nbytes),
                reduction,
            )
        ]
    weight = Value("weight")
    for number, k in enumerate(reversed(range(n))):
        reads = total[number], params[k], *((weight,) if number else ())
        results = () if number else (weight, Value("result", path="1/loss"))
        writes = Value("result", path=f"0/params/{k}"), *results
        tasks += [Compute(f"update {number}", reads, writes, kind="update")]
    return TaskList(tuple(tasks), lambda *args: {}, lambda values: ((), ()))


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
    known_uses = {
        name: use for name, use in uses(4).items() if name != "bucket 1"
    }  # it carries the loss
    assert order(trailed(layers(4), known_uses)) == [0, 1, 2, 3]
    listed = layers(8)
    remaining_tasks = [
        task._replace(reads=tuple(x for x in task.reads if "state" not in x))
        for task in listed.tasks
    ]
    assert order(trailed(listed._replace(tasks=tuple(remaining_tasks)), uses(8))) == list(range(8))


### In training

PARAMS = tied_params(6)


def batch(k: int) -> Any:
    return np.roll(TOKENS, k, axis=0)


def assert_close(got: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, expected
    )


def trainer(replicas: fddp.Group, **options: Any) -> fddp.TrainStep:
    defaults: dict[str, Any] = {"schedule": "eager", "bucket_cap_mb": 0} | options
    return fddp.train_step(tied_net, optax.adam(0.05), group=replicas, **defaults)


class Wire:
    """A transport of one replica with sums that arrive on demand."""

    def __init__(self, replicas: fddp.Group) -> None:
        self.let = math.inf
        self.most = 0
        self.sent = 0
        self.seconds = 0.0
        self.broken = False
        self._under_way = 0
        self._transport = replicas.transport
        self._changed = threading.Condition()
        late = self._transport._replace(all_reduce=self.all_reduce)
        transport = self._transport._replace(more=lambda count: (late,))
        self.group = replace(replicas, transport=transport, journal=Journal(), lane=Lane())

    def all_reduce(self, x: jax.Array) -> jax.Array:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        with self._changed:
            assert self._changed.wait_for(lambda: self.let > 0, 60)
            self.let -= 1
        time.sleep(self.seconds)
        self._under_way = self._under_way - 1
        self.sent = self.sent + 1
        if self.broken:
            raise ArithmeticError("the wire is broken")
        return self._transport.all_reduce(x)

    @contextmanager
    def letting(self, messages: int) -> Iterator[None]:
        """Lets so many messages arrive, and the others at the end."""
        self.let = messages
        try:
            yield
        finally:
            with self._changed:
                self.let = math.inf
                self._changed.notify_all()


def compiled_step(wire: Wire, **options: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
    """A compiled step, and a state that is ready on the device."""
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
    step, state = compiled_step(wire)
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
    step, state = compiled_step(wire)
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
    step, state = compiled_step(wire)
    jax.block_until_ready(state)
    journal_words = list[str]()
    messages = len(step.plan.buckets)
    monkeypatch.setattr(wire.group.journal, "say", journal_words.append)
    with wire.letting(messages - 1):
        state, _ = step(state, batch(1))
        journal_words.clear()
        results = list[Any]()
        thread = threading.Thread(
            target=with_configuration(lambda: results.append(step(state, batch(2))))
        )
        thread.start()
        assert poll(lambda: "stage 3" in journal_words, 60) and not results
    thread.join(60)
    ((state, _),) = results
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
    step, state = compiled_step(wire)
    returned = list[bool]()
    for k in range(1, 6):
        state, _ = step(state, batch(k))
        returned.append(wire.sent < (k + 1) * len(step.plan.buckets))
    assert all(returned), "each returned before its last sum was back"
    assert_close(state.params, plain(PARAMS, 6))


@pytest.mark.steps
def test_a_step_that_is_given_another_state_trains_that_one(group: Groups, x64: None):
    """An earlier state, a copy, and a changed one."""
    wire = Wire(group(1))
    wire.seconds = 0.02
    step = trainer(wire.group, donate=False)
    first = step.init(PARAMS)
    second, _ = step(first, batch(0))
    third, _ = step(second, batch(1))
    second_state, _ = step(first, batch(0))  # third was under way
    copied, _ = step(jax.tree.map(jnp.copy, second_state), batch(1))
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
    step, state = compiled_step(wire)
    with wire.letting(1):
        state, _ = step(state, batch(1))
    other_step = fddp.train_step(tied_net, optax.adam(0.05), group=group(1), schedule=schedule)
    for k in (2, 3):
        state, _ = other_step(state, batch(k))
    assert_close(state.params, plain(PARAMS, 4))


@pytest.mark.steps
def test_a_state_that_a_step_will_write_to_is_used_up_at_once(group: Groups):
    wire = Wire(group(1))
    step, state = compiled_step(wire)
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
    step, state = compiled_step(wire)
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
    step, state = compiled_step(wire, donate=False)
    with wire.letting(1):
        late_state, _ = step(state, batch(1))
        wire.broken = True
    with pytest.raises(ArithmeticError, match="the wire is broken"):
        print(late_state.params)
    wire.broken = False
    with pytest.raises(ArithmeticError, match="the wire is broken"):
        step(late_state, batch(2))
    next_state, _ = step(state, batch(1))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(next_state.params))


def waits_for_all(wire: Wire, call: Callable[[], Any]) -> list[Any]:
    """Makes a call while only the first sum arrives; returns its result or error after the
    others."""
    results = list[Any]()

    def run() -> None:
        try:
            results.append(call())
        except ArithmeticError as error:
            results.append(error)

    thread = threading.Thread(target=with_configuration(run))
    with wire.letting(1):
        thread.start()
        time.sleep(0.5)
        assert not results
    thread.join(60)
    return results


@pytest.mark.steps
def test_an_error_in_a_stage_shows_when_nothing_is_under_way_any_more(group: Groups, monkeypatch):
    wire = Wire(group(1))
    doings = list[str]()
    step, state = compiled_step(wire, donate=False)
    last = max(
        int(task.name.split()[1])
        for task in step.tasks(state, TOKENS).tasks
        if task.kind == "compute"
    )

    def fail_at_last_stage(doing: str) -> None:
        doings.append(doing)
        if doing == f"stage {last}" and doings.count(doing) == 1:
            raise ArithmeticError("on purpose")

    monkeypatch.setattr(wire.group.journal, "say", fail_at_last_stage)
    (error,) = waits_for_all(wire, lambda: step(state, TOKENS))
    assert isinstance(error, ArithmeticError) and str(error) == "on purpose"
    jax.block_until_ready(step(state, TOKENS))
    assert wire.most == 1


@pytest.mark.steps
def test_without_a_communicator_of_its_own_a_step_leaves_nothing(group: Groups):
    wire = Wire(group(1))
    transport = group(1).transport._replace(all_reduce=wire.all_reduce)
    step = trainer(replace(wire.group, transport=transport))
    state, _ = step(step.init(PARAMS), batch(0))
    waits_for_all(wire, lambda: step(state, batch(1)))
    assert wire.most == 1


@pytest.mark.steps
def test_where_an_update_needs_all_sums_the_next_forward_pass_waits_for_all(
    group: Groups, x64: None, monkeypatch
):
    """A clip by the global norm."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))
    wire = Wire(group(1))
    step = fddp.train_step(tied_net, optimizer, group=wire.group, schedule="eager", bucket_cap_mb=0)
    state = step.init(PARAMS)
    for k in range(3):
        state, _ = step(state, batch(k))
    expected = by_plain_jax(tied_net, optimizer, PARAMS, map(batch, range(3))).params
    assert_close(state.params, expected)
    jax.block_until_ready(state)
    journal_words = list[str]()
    messages = len(step.plan.buckets)
    with wire.letting(messages - 1):
        state, _ = step(state, batch(3))
        monkeypatch.setattr(wire.group.journal, "say", journal_words.append)
        thread = threading.Thread(target=with_configuration(lambda: step(state, batch(4))))
        thread.start()
        time.sleep(0.5)
        assert "stage 1" not in journal_words, "the first stage that reads a parameter"
    thread.join(60)
    assert "stage 1" in journal_words


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


def test_a_thread_that_cannot_start_ends_the_step(group: Groups, monkeypatch: pytest.MonkeyPatch):
    step = fddp.train_step(
        lambda w, x: jnp.mean(w * x), optax.sgd(0.1), group=group(2), schedule="eager"
    )
    state = step.init(jnp.ones(4))
    start, started = threading.Thread.start, list[str]()

    def only_once(thread: threading.Thread) -> None:
        if thread.name.startswith("fddp-"):
            started.append(thread.name)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_once)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        step(state, np.ones((2, 4), np.float32))
