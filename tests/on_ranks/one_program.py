"""Steps that are one program, whose messages travel in the group's lane while it computes."""

import time
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of
from trees import close, equal
from truth import by_plain_jax

import fddp
from bench.problems import LAYERS, waiting

ADAM = optax.adam(1e-2)


def net(dtype: Any = np.float32, layers: int = 4) -> Any:
    draw = np.random.default_rng(0)
    layer = lambda: {"w": draw.normal(size=(8, 8)) / 3, "b": np.zeros(8)}  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), {f"{k}": layer() for k in range(layers)})


def loss(p: Any, x: Any) -> jax.Array:
    for name in p:
        x = x + jnp.tanh(x @ p[name]["w"] + p[name]["b"])
    return jnp.mean(x**2)


def batches(group: fddp.Group, count: int) -> np.ndarray:
    draw = np.random.default_rng(1)
    return draw.normal(size=(count, 4 * group.size, 8)).astype(np.float32)


def mine(group: fddp.Group, rows: np.ndarray) -> np.ndarray:
    return rows[4 * group.rank :][:4]


@claim()
def steps_of_many_buckets_in_one_program_train_as_by_plain_jax(group: fddp.Group):
    rows = batches(group, 5)
    expected = by_plain_jax(loss, ADAM, net(), list(rows))
    for shard in (None, "state"):  # sums; exchanges and gathers
        step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0, shard=shard)
        state = step.init(net())
        for batch, value in zip(rows, expected.losses):
            state, info = step(state, mine(group, batch))
            np.testing.assert_allclose(info.loss, value, rtol=1e-5)
        assert len(step.plan.buckets) == 8
        whole = fddp.whole(state.params, group=group)
        close(whole, expected.params, rtol=1e-3, atol=1e-5)


@claim()
def steps_inside_of_a_scan_have_the_bits_of_a_loop_of_steps(group: fddp.Group):
    rows = batches(group, 4)
    step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0.001)
    first, _ = step(step.init(net()), mine(group, rows[0]))
    copy = jax.tree.map(jnp.copy, first)
    looped = first
    for batch in rows[1:]:
        looped, _ = step(looped, mine(group, batch))
    inside = rows[1:]  # over Gloo a program is of all processes, over MPI of one
    if group.backend == "mpi":
        inside = np.stack([mine(group, batch) for batch in inside])
    scanned, infos = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(copy, inside)
    assert infos.loss.shape == (3,)
    equal(fddp.whole(scanned.params, group=group), fddp.whole(looped.params, group=group))


@claim()
def collectives_of_a_loss_inside_of_a_scan_and_buckets_keep_one_order(group: fddp.Group):
    def centred(p: Any, x: Any) -> jax.Array:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            x = jnp.tanh(x @ w)
            return x - jax.lax.pmean(jnp.mean(x, 0), group.axis_name), None

        return jnp.mean((jax.lax.scan(layer, x @ p["in"], p["layers"])[0] - 1) ** 2)

    def joined(p: Any, x: Any) -> jax.Array:
        x = x @ p["in"]
        for w in p["layers"]:
            x = jnp.tanh(x @ w)
            x = x - jnp.mean(x, 0)
        return jnp.mean((x - 1) ** 2)

    draw = np.random.default_rng(2)
    params = {"in": draw.normal(size=(8, 8)), "layers": draw.normal(size=(3, 8, 8)) / 3}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    rows = batches(group, 3)
    expected = by_plain_jax(joined, ADAM, params, list(rows))
    step = fddp.train_step(centred, ADAM, group=group, bucket_cap_mb=0)
    state = step.init(params)
    for batch in rows:
        state, _ = step(state, mine(group, batch))
    close(fddp.whole(state.params, group=group), expected.params, rtol=1e-3, atol=1e-4)


@claim()
def an_evaluation_between_steps_in_flight_meets_only_itself(group: fddp.Group):
    rows = batches(group, 6)
    step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0)
    state = step.init(net())
    metric = lambda p, x: {"loss": loss(p, x)}  # noqa: E731
    for batch in rows:
        state, _ = step(state, mine(group, batch))
        # Nothing has waited for the step.
        means = fddp.evaluate(metric, state.params, [mine(group, batch)], group=group)
        value = loss(jax.device_get(fddp.whole(state.params, group=group)), batch)
        np.testing.assert_allclose(means["loss"], value, rtol=1e-5)


@claim()
def messages_of_16_bits_and_of_integers_and_of_nothing_arrive(group: fddp.Group):
    def mixed(p: Any, x: Any, *, model_state: Any) -> Any:
        net = jax.tree.map(lambda w: w.astype(jnp.float32), p["net"])
        value = loss(net, x) + jnp.sum(p["none"])
        return value, ({"count": model_state["count"] + 1}, {"rows": jnp.float32(x.shape[0])})

    params = {"net": net(jnp.bfloat16), "none": jnp.zeros((0, 3))}
    step = fddp.train_step(mixed, optax.sgd(0.1), group=group, has_aux=True)
    state = step.init(params, model_state={"count": jnp.int32(3)})
    state, _ = step(state, mine(group, batches(group, 1)[0]))
    assert int(state.model_state["count"]) == 4
    assert state.params["net"]["0"]["w"].dtype == jnp.bfloat16
    assert state.params["none"].shape == (0, 3)


@claim(backends=("mpi",))
def every_message_of_a_step_has_its_times_and_one_travels_at_a_time(group: fddp.Group):
    rows = batches(group, 4)
    step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0, schedule="overlap")
    state = step.init(net())
    names = sorted(f"bucket {k}" for k in range(8))
    ends = [time.monotonic()]
    for batch in rows:
        state, _ = step(state, mine(group, batch))
        state, _ = step(state, mine(group, batch))  # the first of the two may still run
        line = step.timeline()
        messages = line.messages
        assert sorted(x.name for x in messages) == sorted(x.name for x in line.communication)
        assert sorted(x.name for x in messages) == names
        for x in messages:
            assert x.started <= x.sent <= x.received <= x.resumed <= x.done, x
            assert x.awaited <= x.resumed, x
        sent = sorted(messages, key=lambda x: x.sent)
        assert all(a.received <= b.sent for a, b in pairwise(sent))
        assert all(a.done <= b.awaited for a, b in pairwise(messages))
        nbytes = {x.name: x.nbytes for x in messages}
        tail = nbytes["bucket 0"] - step.plan.buckets[0].nbytes  # loss and weight
        assert tail >= 0
        for k, bucket in enumerate(step.plan.buckets):
            assert nbytes[f"bucket {k}"] - bucket.nbytes == (0 if k else tail)
        assert ends[-1] <= min(x.start for x in line.spans) < line.end <= time.monotonic()
        ends.append(line.end)
        # An evaluation's messages travel in the same lane, and are not the step's.
        fddp.evaluate(lambda p, x: loss(p, x), state.params, [mine(group, batch)], group=group)
        assert step.timeline() == line


@claim(backends=("mpi",))
def a_step_inside_of_a_scan_has_the_times_of_its_last_round(group: fddp.Group):
    rows = batches(group, 4)
    step = fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0, schedule="overlap")
    state, _ = step(step.init(net()), mine(group, rows[0]))
    before = step.timeline().end
    stacked = jnp.stack([mine(group, batch) for batch in rows[1:]])
    jax.block_until_ready(
        jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(state, stacked)
    )
    line = step.timeline()
    assert sorted(x.name for x in line.messages) == sorted(f"bucket {k}" for k in range(8))
    assert before < min(x.start for x in line.spans)


@claim(backends=("mpi",))
def a_first_state_is_committed_so_that_the_second_step_compiles_nothing(group: fddp.Group):
    state = fddp.train_step(loss, ADAM, group=group).init(net())
    assert all(x.committed for x in jax.tree.leaves(state))


@claim(backends=("mpi",))
def messages_of_after_start_behind_the_whole_backward_pass(group: fddp.Group):
    """Each layer sleeps before its gradient is there."""
    seconds = 0.05
    task = waiting(group.rank, 8, forward_s=0.0, backward_s=seconds)
    options: Any = {"schedule": "after", "bucket_cap_mb": 0, "has_aux": True}
    step = fddp.train_step(task.loss_fn, optax.sgd(0.1), group=group, **options)
    state, _ = step(step.init(task.params), task.batch)
    step(state, task.batch)
    line = step.timeline()
    assert len(line.messages) == LAYERS
    begin = min(x.start for x in line.spans)
    assert min(x.started for x in line.messages) - begin >= LAYERS * seconds


@claim(backends=("mpi",))
def a_step_waits_for_a_late_rank_where_nothing_is_left_to_compute(group: fddp.Group):
    """One layer: its sum is awaited at once, and overlaps with nothing."""
    step = fddp.train_step(
        lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group, schedule="overlap"
    )
    state = step.init(jnp.ones(8))
    batch = mine(group, batches(group, 1)[0])
    state, _ = step(state, batch)
    group.barrier()
    late = 0.5
    if group.rank:
        time.sleep(late)
    state, _ = step(state, batch)
    line = step.timeline()
    if not group.rank:
        (message,) = line.messages
        assert message.received - message.sent > late / 2
        assert line.overlap_share < 0.5


@claim()
def an_audit_of_messages_between_processes_needs_a_target(group: fddp.Group):
    step = fddp.train_step(loss, ADAM, group=group)
    state, batch = step.init(net()), mine(group, batches(group, 1)[0])
    assert "give a target" in error_of(lambda: fddp.audit(step, state, batch))
