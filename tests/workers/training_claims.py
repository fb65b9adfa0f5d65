"""What steps make of ranks that hold different values, on problems small enough for paper.

Most train w under the loss mean((w - x)²) by SGD with rate 0.5: one step takes w to the mean of the x.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from workers.claims import claim, error_of

import fddp
from fddp.schedules import TRIED

RATE = 0.5


def square(w: Any, x: Any) -> jax.Array:
    return jnp.mean((w - x) ** 2)


def towards_the_mean(group: fddp.Group, **options: Any) -> fddp.TrainStep:
    return fddp.train_step(square, optax.sgd(RATE), group=group, **options)


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def same_on_all_ranks(group: fddp.Group, tree: Any) -> bool:
    data = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))
    gathered = group.all_gather(np.frombuffer(data, np.uint8))
    return bool(np.all(gathered == gathered[0]))


### Starts


@claim()
def a_step_starts_from_rank_0s_values_bit_for_bit(group: fddp.Group):
    nan = np.array([0x7FC12345, 0x80000000], np.uint32).view(np.float32)  # a NaN with a payload, and -0.0
    theirs = {
        "bf16": np.full((2, 1), 1.5, jnp.bfloat16),
        "empty": np.zeros((0, 2), np.float32),
        "float64": np.array([1 / 3], np.float64),
        "int": np.array([2**31 - 1], np.int32),
        "nan": nan,
        "scalar": np.float32(0.1),
    }
    mine = theirs if group.rank == 0 else jax.tree.map(np.zeros_like, theirs)
    jax.config.update("jax_enable_x64", True)
    try:
        step = fddp.train_step(lambda p, x: jnp.mean(x), optax.sgd(0.1), group=group)
        state = step.init(mine, model_state={"key": jax.random.key(group.rank)}, rng=jax.random.key(group.rank))
    finally:
        jax.config.update("jax_enable_x64", False)
    for name, value in theirs.items():
        assert state.params[name].dtype == value.dtype, name
        assert np.asarray(state.params[name]).tobytes() == value.tobytes(), name
    for key in (state.rng, state.model_state["key"]):
        assert np.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(0)))


@claim()
def init_leaves_the_callers_arrays_alone(group: fddp.Group):
    mine = jnp.full(2, group.rank, jnp.float32)
    step = towards_the_mean(group)
    state, _ = step(step.init(mine), rows(1.0))
    assert mine.tolist() == [group.rank] * 2
    assert same_on_all_ranks(group, state.params)


### Means


def numbers_of_ranks(group: fddp.Group) -> np.ndarray:
    """One of each rank, of which the mean is a whole number, as is that of their squares."""
    return 6 * np.arange(group.size)


@claim()
def a_step_takes_the_mean_over_ranks(group: fddp.Group):
    numbers = numbers_of_ranks(group)
    for schedule in ("fused", "staged", "after", "auto"):
        step = towards_the_mean(group, schedule=schedule)
        state, info = step(step.init(jnp.zeros(())), rows(*2 * [numbers[group.rank]]))
        assert float(state.params) == numbers.mean(), schedule
        assert float(info.loss) == (numbers**2).mean(), schedule


@claim()
def value_and_grad_takes_the_mean_over_ranks(group: fddp.Group):
    f = fddp.value_and_grad(square, group=group)
    numbers = numbers_of_ranks(group)
    loss, grad = f(jnp.zeros(()), rows(numbers[group.rank]))
    assert (float(loss), float(grad)) == ((numbers**2).mean(), -2 * numbers.mean())


@claim()
def inside_a_context_of_64_bits_a_step_trains_in_64_bits(group: fddp.Group):
    third = 1 / 3 + np.arange(group.size)  # exact in no float32
    for schedule in ("fused", "staged", "after"):
        with jax.enable_x64(True):
            step = towards_the_mean(group, schedule=schedule)
            state, info = step(step.init(np.zeros(())), third[group.rank :][:1])
        assert (state.params.dtype, info.loss.dtype) == (np.float64, np.float64), schedule
        np.testing.assert_allclose(state.params, third.mean(), rtol=1e-15)


@claim()
def metrics_are_averaged_over_ranks(group: fddp.Group):
    step = fddp.train_step(lambda w, x: (square(w, x), {"row": x[0]}), optax.sgd(RATE), group=group, has_aux=True)
    _, info = step(step.init(jnp.zeros(())), rows(group.rank))
    assert float(info.aux["row"]) == np.arange(group.size).mean()


@claim()
def no_sync_waits_for_the_next_step(group: fddp.Group):
    step = towards_the_mean(group)
    state, own = step.no_sync(step.init(jnp.zeros(())), rows(group.rank))
    assert float(own.loss) == group.rank**2, "of this rank's rows alone"
    assert float(state.params) == 0
    state, _ = step(state, rows(group.rank + 1))
    assert float(state.params) == np.arange(group.size).mean() + 0.5


@claim()
def a_shorter_last_batch_on_one_rank_counts_by_its_rows(group: fddp.Group):
    all_rows = [0.0] * 4 * (group.size - 1) + [8.0, 8.0]
    for schedule in ("fused", "staged", "after"):
        step = towards_the_mean(group, schedule=schedule)
        state, _ = step(step.init(jnp.zeros(())), rows(0, 0, 0, 0))
        short = group.rank == group.size - 1
        state, info = step(state, rows(8, 8) if short else rows(0, 0, 0, 0))
        np.testing.assert_allclose(state.params, np.mean(all_rows), rtol=1e-6, err_msg=schedule)
        np.testing.assert_allclose(info.loss, np.square(all_rows).mean(), rtol=1e-6, err_msg=schedule)


@claim()
def few_rows_of_a_table_travel_and_more_of_them_too(group: fddp.Group):
    """Each rank looks up three rows, then rank 0 seven, of which the message has no room for four."""
    lookups = [[(5 * rank + k) % 7 for k in range(3)] for rank in range(group.size)]
    more = [[0, 1, 2, 3, 4, 50, 59], *lookups[1:]]
    expected, whole = np.zeros((20_000, 2)), 4 * 20_000 * 2
    for step_rows in (lookups, more):
        joined = np.concatenate(step_rows)
        np.add.at(expected, joined, -1 / len(joined))
    for schedule in ("fused", "staged"):
        step = fddp.train_step(
            lambda p, ids: jnp.mean(jnp.sum(p[ids], axis=1)), optax.sgd(1.0), group=group, schedule=schedule
        )
        state, few = step(step.init(np.zeros((20_000, 2), np.float32)), np.array(lookups[group.rank]))
        state, many = step(state, np.array(more[group.rank]))
        np.testing.assert_allclose(state.params, expected, rtol=1e-6, err_msg=schedule)
        assert same_on_all_ranks(group, state.params), schedule
        assert int(few.sent[0]) == (group.size - 1) * (3 * (2 + 1) + 1) * 4 < whole < int(many.sent[0]), schedule


@claim()
def parameters_in_bfloat16_are_trained(group: fddp.Group):
    for schedule in ("fused", "staged", "after"):
        step = towards_the_mean(group, schedule=schedule)
        state, info = step(step.init(jnp.zeros(2, jnp.bfloat16)), rows(group.rank, group.rank)[:, None])
        assert state.params.dtype == jnp.bfloat16
        assert state.params.tolist() == [np.arange(group.size).mean() / 2] * 2, schedule
        assert info.loss.dtype == jnp.float32


@claim()
def parameters_without_a_gradient_stay(group: fddp.Group):
    step = fddp.train_step(lambda p, x: square(p["w"], x), optax.sgd(RATE), group=group)
    state, _ = step(step.init({"count": jnp.int32(3), "w": jnp.zeros(())}), rows(group.rank))
    assert int(state.params["count"]) == 3
    assert float(state.params["w"]) == np.arange(group.size).mean()


@claim(sizes=(3, 4))
def two_subgroups_train_apart(group: fddp.Group):
    """Two pairs, or a pair and one that is alone; each starts from its own first rank."""
    ranks = [r for r in range(group.size) if r // 2 == group.rank // 2]
    mine = group.subgroup(ranks)
    for schedule in ("fused", "staged", "after"):
        step = towards_the_mean(mine, schedule=schedule)
        state, info = step(step.init(jnp.float32(group.rank)), rows(group.rank))
        assert float(state.params) == np.mean(ranks), schedule
        assert float(info.loss) == np.mean(np.square(np.subtract(ranks, ranks[0]))), schedule


@claim()
def two_jobs_of_one_group_do_not_meet(group: fddp.Group):
    one, two = towards_the_mean(group), towards_the_mean(group.subgroup(range(group.size)))
    a, b = one.init(jnp.zeros(())), two.init(jnp.ones(()))
    for _ in range(2):
        a, _ = one(a, rows(group.rank))
        b, _ = two(b, rows(group.rank + 1))
    assert float(b.params) == float(a.params) + 1


@claim()
def a_step_of_several_programs_makes_no_transfer_that_nobody_asked_for(group: fddp.Group):
    for options in ({}, {"hook": fddp.hooks.bf16()}):
        for schedule in ("staged", "after"):
            step = towards_the_mean(group, schedule=schedule, **options)
            state, mine = step.init(np.zeros(())), jax.device_put(rows(group.rank))
            state, _ = step(state, mine)
            with jax.transfer_guard("disallow"):
                state, _ = step(state, mine)
            assert float(state.params) == np.arange(group.size).mean(), schedule


@claim(quick=("mpi",))
def without_jit_a_step_of_no_schedule_in_particular_trains_too(group: fddp.Group):
    with jax.disable_jit():
        step = towards_the_mean(group)
        state, _ = step(step.init(np.zeros(())), rows(group.rank))
    assert float(state.params) == np.arange(group.size).mean()


### Buffers and random keys


def keep_mean(w: Any, x: Any, *, model_state: Any) -> Any:
    return square(w, x) + 0 * model_state["seen"], ({"calls": model_state["calls"] + 1, "seen": jnp.mean(x)}, None)


@claim()
def rank_0s_buffers_are_everybodys(group: fddp.Group):
    for schedule in ("fused", "staged", "after"):
        step = fddp.train_step(keep_mean, optax.sgd(RATE), group=group, schedule=schedule)
        state = step.init(jnp.zeros(()), model_state={"calls": jnp.int32(2**30), "seen": jnp.float32(group.rank + 5)})
        assert float(state.model_state["seen"]) == 5
        state, _ = step(state, rows(group.rank + 3))
        assert float(state.model_state["seen"]) == 3, f"{schedule}: what rank 0 saw"
        assert int(state.model_state["calls"]) == 2**30 + 1, "exact, though it travels among floats"


@claim()
def without_broadcast_every_rank_keeps_its_buffers(group: fddp.Group):
    for schedule in ("fused", "staged", "after"):
        step = fddp.train_step(keep_mean, optax.sgd(RATE), group=group, schedule=schedule, broadcast_buffers=False)
        state = step.init(jnp.zeros(()), model_state={"calls": jnp.int32(0), "seen": jnp.float32(0)})
        for number in range(2):
            state, _ = step(state, rows(group.rank + number))
        mine = state.model_state["seen"].addressable_shards[0].data
        assert float(mine) == group.rank + 1, schedule


@claim()
def random_keys_differ_between_ranks_and_steps(group: fddp.Group):
    def draw(w: Any, x: Any, *, rng: Any) -> Any:
        number = jax.random.uniform(rng)
        return square(w, x), {"number": number}

    step = fddp.train_step(draw, optax.sgd(RATE), group=group, has_aux=True)
    state, drawn = step.init(jnp.zeros(()), rng=jax.random.key(1)), []
    for _ in range(2):
        _, mine = step.no_sync(jax.tree.map(jnp.copy, state), rows(1.0))
        drawn.extend(group.all_gather(np.asarray(mine.aux["number"])).tolist())
        state, info = step(state, rows(1.0))
        assert np.isclose(float(info.aux["number"]), np.mean(drawn[-group.size :])), "the step draws the same"
    assert len(set(drawn)) == 2 * group.size


### Flax modules


@claim()
def one_rank_alone_evaluates_the_module_of_a_state(group: fddp.Group):
    from flax import nnx

    net = fddp.from_nnx(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), lambda model, x: jnp.mean((model(x) - 1) ** 2))
    step = fddp.train_step(net.loss_fn, optax.sgd(RATE), group=group)
    state, _ = step(step.init(net.params), rows(group.rank)[None])
    want = 2 * np.array(state.params["kernel"]) + np.array(state.params["bias"])
    models = [net.module(state)] if group.rank == group.processes - 1 else []
    step(state, rows(group.rank)[None])
    for model in models:
        np.testing.assert_allclose(model(rows(2)[None]), want, rtol=1e-6)


### Collectives of the loss itself


def centred(w: Any, x: Any) -> jax.Array:
    return square(w, x - jax.lax.pmean(jnp.mean(x), "replica"))


@claim(backends=("gloo",))
def a_loss_may_have_collectives_over_the_groups_axis(group: fddp.Group):
    step = fddp.train_step(centred, optax.sgd(RATE), group=group)
    _, info = step(step.init(jnp.zeros(())), rows(group.rank))
    assert float(info.loss) == np.arange(group.size).var()


@claim(backends=("gloo",))
def a_staged_loss_with_collectives_is_an_error(group: fddp.Group):
    step = fddp.train_step(centred, optax.sgd(RATE), group=group, schedule="staged")
    state = step.init(jnp.zeros(()))
    message = error_of(lambda: step(state, rows(group.rank)))
    assert "schedule='fused'" in message


@claim(backends=("mpi",))
def under_mpi_a_loss_with_collectives_is_an_error(group: fddp.Group):
    assert group.axis_name is None
    step = fddp.train_step(centred, optax.sgd(RATE), group=group)
    state = step.init(jnp.zeros(()))
    message = error_of(lambda: step(state, rows(group.rank)))
    assert "replica" in message
    assert "'mpi' has no mesh axis" in message
    assert "'gloo'" in message


@claim(backends=("mpi",))
def under_mpi_cross_replica_batch_norm_is_an_error(group: fddp.Group):
    from workers.trainings import batch, linen

    from models import resnet

    model = linen("resnet-bn", "sgd", axis_name="replica")
    rows = batch("resnet-bn", 0)
    params, model_state = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype),
        jax.eval_shape(lambda key: resnet.init(model, key, rows), jax.random.key(0)),
    )
    step = fddp.train_step(resnet.loss_fn(model), optax.sgd(RATE), group=group)
    state = step.init(params, model_state=model_state)
    assert "'mpi' has no mesh axis" in error_of(lambda: step(state, rows))


### Ranks whose programs differ


@claim()
def ranks_whose_branches_in_python_differ_sum_every_bucket(group: fddp.Group):
    def loss(p: Any, x: Any) -> jax.Array:  # as many numbers in the bucket of a and in that of b, loss and weight too
        first = jnp.mean(x @ p["a"])
        return first + jnp.sum(p["b"] * x[0, 0]) if group.rank else first

    params = {"a": np.zeros((4, 4), np.float32), "b": np.zeros(18, np.float32)}
    share = (group.size - 1) / group.size
    for schedule in ("fused", "staged", "after", "eager"):
        step = fddp.train_step(loss, optax.sgd(1.0), group=group, schedule=schedule, bucket_cap_mb=0)
        state, info = step(step.init(params), np.ones((2, 4), np.float32))
        assert len(step.plan.buckets) == 2
        assert np.all(np.asarray(state.params["a"]) == -0.25), schedule
        np.testing.assert_allclose(np.asarray(state.params["b"]), -share, rtol=1e-6, err_msg=schedule)
        assert same_on_all_ranks(group, (state.params, info.loss)), schedule


@claim()
def ranks_whose_branches_in_python_differ_put_off_the_same_sums(group: fddp.Group):
    """Rank 0 does not read one of the leaves, so its own program would tell it another order of what is put off."""

    def loss(p: Any, x: Any) -> Any:
        return sum(jnp.mean((w - x[0]) ** 2) * (k + 1) for k, w in enumerate(p) if group.rank or k != 6)

    params, batch, ended = [np.full(1000 + 7 * k, k, np.float32) for k in range(13)], np.ones(2, np.float32), []
    for schedule in ("staged", "eager"):
        step = fddp.train_step(loss, optax.sgd(0.5), group=group, schedule=schedule, bucket_cap_mb=0)
        state = step.init(params)
        for _ in range(5):
            state, _ = step(state, batch)
        ended.append(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *ended)
    assert same_on_all_ranks(group, ended[1])


@claim(quick=("mpi", "gloo"))
def what_is_used_first_and_ready_last_is_never_trained_on_stale(group: fddp.Group):
    """A tied embedding and a layer that is skipped, against plain JAX on the joined batch."""

    def loss(p: Any, x: Any) -> jax.Array:
        h = x @ p["embedding"]
        aside = h @ p["skipped"]
        for w in p["layers"]:
            h = jnp.tanh(h @ w)
        return jnp.mean(((h + aside) @ p["embedding"].T - x) ** 2)

    draw = np.random.default_rng(0)
    params = {
        "embedding": draw.normal(size=(32, 64)).astype(np.float32) / 8,
        "skipped": draw.normal(size=(64, 64)).astype(np.float32) / 8,
        "layers": [draw.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(9)],
    }
    rows = draw.normal(size=(4 * group.size, 32)).astype(np.float32)
    optimizer = optax.adam(1e-3)
    expected, held = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    step = fddp.train_step(loss, optimizer, group=group, schedule="eager", bucket_cap_mb=0)
    state = step.init(params)
    for k in range(TRIED + 2):  # in both orders of the messages, and in the one that stays
        batch = np.roll(rows, k, axis=0)
        state, info = step(state, batch[4 * group.rank :][:4])
        value, grads = jax.value_and_grad(loss)(expected, batch)
        np.testing.assert_allclose(info.loss, value, rtol=1e-5)
        updates, held = optimizer.update(grads, held, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), state.params, expected)


### Rows


@claim(quick=("gloo",))
def later_batches_may_have_unequally_many_rows(group: fddp.Group):
    counts = [4 + 2 * rank for rank in range(group.size)]
    data = np.random.default_rng(5).normal(size=(sum(counts), 3)).astype(np.float32)
    mine = np.split(data, np.cumsum(counts)[:-1])[group.rank]

    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - 1) ** 2), {"mean": jnp.mean(x)}

    for schedule in ("fused", "staged", "after"):
        options: dict[str, Any] = {"group": group, "schedule": schedule, "has_aux": True, "accumulation_steps": 2}
        step = fddp.train_step(loss, optax.sgd(RATE), **options)
        state = step.init(np.zeros(3, np.float32))
        state, _ = step(state, np.zeros((4, 3), np.float32))
        old = np.asarray(state.params)
        (_, aux), grads = jax.value_and_grad(loss, has_aux=True)(old, data)
        held, _ = step.no_sync(jax.tree.map(jnp.copy, state), mine[:2])
        for before, rest in ((state, mine), (held, mine[2:])):
            after, info = step(before, rest)
            np.testing.assert_allclose(np.asarray(after.params), old - RATE * grads, rtol=1e-5, err_msg=schedule)
            np.testing.assert_allclose(np.asarray(info.aux["mean"]), aux["mean"], rtol=1e-5, err_msg=schedule)
            assert same_on_all_ranks(group, after.params), schedule


@claim()
def a_used_up_state_is_an_error_on_every_schedule(group: fddp.Group):
    for schedule in ("fused", "staged", "after"):
        step = towards_the_mean(group, schedule=schedule)
        state = step.init(jnp.zeros(()))
        later, _ = step(state, rows(group.rank))
        assert "donate=False" in error_of(lambda step=step, state=state: step(state, rows(1.0)))
        step(later, rows(1.0))


### Shards


@claim()
def a_state_in_shards_trains_as_a_whole_one(group: fddp.Group):
    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["w"]) - p["b"]) ** 2)

    params = {"w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), "b": np.float32(0.25)}
    batch = np.sin(np.arange(12 * group.size, dtype=np.float32)).reshape(-1, 3)
    mine = batch.reshape(group.size, -1, 3)[group.rank]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))
    expected = jax.tree.map(jnp.asarray, params)
    opt_state = optimizer.init(expected)
    for _ in range(3):
        updates, opt_state = optimizer.update(jax.grad(loss)(expected, batch), opt_state, expected)
        expected = optax.apply_updates(expected, updates)
    ways = (
        ("fused", "optimizer", 1),
        ("staged", "optimizer", 4),
        ("staged", "state", 1),
        ("fused", "state", 2),
        ("eager", "state", 2),
    )
    for schedule, shard, micro_batches in ways:
        options: Any = {"schedule": schedule, "shard": shard, "bucket_cap_mb": 0, "accumulation_steps": micro_batches}
        step = fddp.train_step(loss, optimizer, group=group, **options)
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, mine)
        held = state.opt_state[1][0].mu["w"] if shard == "optimizer" else state.params["w"]
        assert held.parts.addressable_shards[0].data.shape == (-(-15 // group.size),)
        whole = fddp.whole(state, group=group)
        for got, wanted in zip(
            jax.tree.leaves((whole.params, whole.opt_state)), jax.tree.leaves((expected, opt_state))
        ):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5, atol=1e-6)
        assert same_on_all_ranks(group, (whole.params, whole.opt_state))


@claim(sizes=(3, 4))
def shards_of_a_subgroup_are_put_together_by_its_ranks(group: fddp.Group):
    ranks = [0, 1] if group.rank < 2 else list(range(2, group.size))
    if len(ranks) == 1:
        return
    pair = group.subgroup(ranks)
    step = fddp.train_step(lambda w, x: jnp.mean((w - x) ** 2), optax.adam(0.1), group=pair, shard="state")
    first = np.arange(5, dtype=np.float32) + ranks[0]
    state = step.init(first)
    np.testing.assert_array_equal(fddp.whole(state.params), first)
    np.testing.assert_array_equal(fddp.whole(state, group=pair).params, first)
    assert "the group is another" in error_of(lambda: fddp.whole(state, group=group))


@claim()
def what_is_under_way_between_two_steps_meets_nothing_that_is_said_there(group: fddp.Group):
    """Gathers of the next step lie beside whatever a loop does: its results are right, and so is the training."""

    def loss(p: Any, x: Any) -> jax.Array:
        for w in p:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [np.sin(np.arange(64.0 * 64, dtype=np.float32) + k).reshape(64, 64) / 8 for k in range(6)]
    batch = np.cos(np.arange(2 * 64.0 * group.size, dtype=np.float32)).reshape(group.size, 2, 64)
    large, ended = np.full(2**16, group.rank + 1.0, np.float32), []
    cases: Any = (("staged", "state"), ("eager", "state"), ("eager", None))
    for schedule, shard in cases:
        step = fddp.train_step(
            loss, optax.sgd(0.05, momentum=0.9), group=group, schedule=schedule, shard=shard, bucket_cap_mb=0
        )
        state, losses = step.init(params), []
        for number in range(8):
            state, info = step(state, batch[group.rank])
            losses.append(float(info.loss))
            total = group.all_reduce(large)
            assert np.all(total == sum(range(1, group.size + 1)))
            if number % 2:
                assert same_on_all_ranks(group, fddp.whole(state.params, group=group))
            if number == 4:
                state, _ = step.no_sync(state, batch[group.rank])
            if number == 6:
                state = jax.tree.map(jnp.copy, state)
            assert np.isfinite(fddp.evaluate(loss, state, [batch[group.rank]], group=group))
        ended.append((fddp.whole(state.params, group=group), losses))
    first, *others = ended
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), first, other)


@claim(quick=("mpi",))
def a_matrix_that_an_update_needs_whole_is_gathered(group: fddp.Group):
    def loss(p: Any, x: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["v"]) @ p["w"] - p["b"]) ** 2)

    params = {"v": np.sin(np.arange(15.0)).reshape(3, 5), "w": np.cos(np.arange(20.0)).reshape(5, 4), "b": np.ones(4)}
    batch = np.sin(np.arange(12.0 * group.size)).reshape(-1, 3)
    mine = batch.reshape(group.size, -1, 3)[group.rank]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.contrib.muon(0.05, weight_decay=0.1))
    jax.config.update("jax_enable_x64", True)  # the threads of a step are to know it, too
    try:
        expected = jax.tree.map(jnp.asarray, params)
        opt_state = optimizer.init(expected)
        for _ in range(2):
            updates, opt_state = optimizer.update(jax.grad(loss)(expected, batch), opt_state, expected)
            expected = optax.apply_updates(expected, updates)
        for schedule, shard in (("fused", "optimizer"), ("staged", "state"), ("after", "optimizer")):
            options: Any = {"schedule": schedule, "shard": shard, "bucket_cap_mb": 0}
            step = fddp.train_step(loss, optimizer, group=group, **options)
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, mine)
            whole = fddp.whole(state, group=group)
            for got, wanted in zip(
                jax.tree.leaves((whole.params, whole.opt_state)), jax.tree.leaves((expected, opt_state))
            ):
                np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-9, atol=1e-13)
            assert same_on_all_ranks(group, (whole.params, whole.opt_state))
    finally:
        jax.config.update("jax_enable_x64", False)


@claim()
def ranks_that_train_alone_send_nothing_and_then_agree(group: fddp.Group):
    batches = np.sin(np.arange(5 * 4 * group.size, dtype=np.float32)).reshape(5, group.size, 4)
    cases: Any = (("fused", 0), ("staged", 1))
    for schedule, delay in cases:
        optimizer = fddp.local_steps(optax.sgd(RATE, momentum=0.5), outer=optax.sgd(0.7), every=2, delay=delay)
        step = fddp.train_step(square, optimizer, group=group, schedule=schedule)
        state, sent = step.init(jnp.zeros(())), []
        own, speed, shared = np.zeros(group.size), np.zeros(group.size), 0.0
        for number, batch in enumerate(batches, start=1):
            state, info = step(state, batch[group.rank])
            sent.append(bool(np.asarray(info.sent).any()))
            before = own
            speed = 0.5 * speed + 2 * (own - batch.mean(axis=1))
            own = own - RATE * speed
            if number > delay and (number - delay) % 2 == 0:
                shared -= 0.7 * (shared - np.mean(before if delay else own))
                own = np.full(group.size, shared)
        assert sent == ([False, False, True, False, True] if delay else [False, True, False, True, False])
        np.testing.assert_allclose(float(state.opt_state.shared), shared, rtol=1e-5)
        whole = fddp.whole(state, group=group)
        np.testing.assert_allclose(whole.params, np.mean(own), rtol=1e-5)
        mine = np.asarray(state.params.parts.addressable_shards[0].data)
        np.testing.assert_allclose(mine, own[group.rank : group.rank + 1], rtol=1e-5)
        assert same_on_all_ranks(group, whole)


@claim(quick=("gloo",))
def a_norm_of_some_leaves_is_not_taken_beside_a_message(group: fddp.Group):
    """The leaf that is ready last is clipped alone: its update speaks with the others while nothing else may."""
    params = {f"p{k:02}": np.full((8, 8), 0.1 + k / 100, np.float32) for k in range(8)}
    sgd = optax.sgd(0.01, momentum=0.5)
    labels: Any = {name: "clipped" if name == "p00" else "plain" for name in params}
    rules: Any = {"plain": sgd, "clipped": optax.chain(optax.clip_by_global_norm(0.01), sgd)}

    def loss(p: Any, x: Any) -> jax.Array:
        for name in sorted(p):
            x = jnp.tanh(x @ p[name])
        return jnp.mean(x**2)

    ends = []
    for shard in (None, "optimizer"):
        options: Any = {"schedule": "staged", "bucket_cap_mb": 0, "shard": shard}
        step = fddp.train_step(loss, optax.multi_transform(rules, labels), group=group, **options)
        state = step.init(params)
        for _ in range(30):
            state, _ = step(state, np.full((4, 8), group.rank + 1.0, np.float32))
        ends.append(state.params)
    for got, wanted in zip(*map(jax.tree.leaves, ends)):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-5)
