"""Parameters gathered for each pass, and dropped between: the same training, never whole at
once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_schedule import SCHEDULES
from tied_net import ADAM, TOKENS, plain, tied_net, tied_params
from trees import close
from truth import by_plain_jax

import fddp
from fddp.buckets import take_apart
from fddp.comm import of_one_replica, trace
from fddp.schedules import Communicate

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
LAYERS = 3
WIDTH = 6
ROWS = np.random.default_rng(0).normal(size=(24, WIDTH))


def weights() -> dict[str, Any]:
    make = np.random.default_rng(1).normal
    return {f"w{k}": make(size=(WIDTH, WIDTH)) / 3 for k in range(4)} | {"empty": np.zeros((0, 2))}


def deep(p: Any, x: Any) -> jax.Array:
    for k in range(4):
        x = jnp.tanh(x @ p[f"w{k}"])
    return jnp.mean((x - 1) ** 2)


def of_scaled_weights(p: Any, x: Any) -> jax.Array:
    return deep(jax.tree.map(lambda w: jnp.maximum(w.T * 2, -1), p), x)


def penalised(p: Any, x: Any) -> jax.Array:
    return deep(p, x) + 0.1 * sum(jnp.sum(w**2) for w in p.values())


def rematerialised(p: Any, x: Any) -> jax.Array:
    for k in range(4):
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p[f"w{k}"], x)
    return jnp.mean((x - 1) ** 2)


def looped(p: Any, x: Any) -> jax.Array:
    stack = jnp.stack([p[f"w{k}"] for k in range(4)])
    return jnp.mean((jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0] - 1) ** 2)


def centred(p: Any, x: Any) -> jax.Array:
    for k in range(4):
        x = jnp.tanh(x @ p[f"w{k}"])
        x = x - jax.lax.pmean(jnp.mean(x, axis=0), "replica")
    return jnp.mean((x - 1) ** 2)


def branching(p: Any, x: Any) -> jax.Array:
    x = jax.lax.cond(jnp.sum(x) > 0, lambda x: x @ p["w0"], lambda x: x @ p["w1"], x)
    return jnp.mean((jnp.tanh(x @ p["w2"] @ p["w3"]) - 1) ** 2)


LOSSES = [deep, of_scaled_weights, penalised, rematerialised, looped, branching]


def resharded_step(loss: Any, group: fddp.Group, **options: Any) -> fddp.TrainStep:
    settings = {"shard": "state", "reshard_after_forward": True, "bucket_cap_mb": 0} | options
    return fddp.train_step(loss, ADAM, group=group, **settings)


@pytest.mark.quick("3-staged", "1-fused", "2-after", "4-fused")
@pytest.mark.parametrize(
    ("n", "schedule"),
    [*((n, "fused") for n in (1, 2, 3, 4)), (3, "staged"), (2, "staged"), (2, "after")],
)
def test_a_net_with_tied_and_skipped_layers_is_trained(
    group: Groups, x64: None, n: int, schedule: str
):
    step = resharded_step(tied_net, group(n), schedule=schedule)
    state = step.init(tied_params(LAYERS))
    for k in range(3):
        state, _ = step(state, np.roll(TOKENS, k, axis=0))
    close(fddp.whole(state.params), plain(tied_params(LAYERS), 3))


@pytest.mark.quick("branching-fused", "penalised-fused", "looped-fused")
@SCHEDULES
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses_of_all_kinds_are_trained(group: Groups, x64: None, loss: Any, schedule: str):
    step = resharded_step(loss, group(2), schedule=schedule)
    state = step.init(weights())
    for k in range(2):
        state, _ = step(state, ROWS + k)
    # A branch is taken by the rows that a replica has; here all have the same sign.
    expected = by_plain_jax(loss, ADAM, weights(), [ROWS, ROWS + 1]).params
    close(fddp.whole(state.params), expected)


@SCHEDULES
def test_gathers_mix_with_collectives_of_the_loss(group: Groups, x64: None, schedule: str):
    step = resharded_step(centred, group(2), schedule=schedule)
    state, _ = step(step.init(weights()), ROWS)
    reference = fddp.train_step(centred, ADAM, group=group(1))
    close(fddp.whole(state.params), reference(reference.init(weights()), ROWS)[0].params)


@pytest.mark.quick("skip_nonfinite, accumulation_steps-fused", "hook-fused")
@SCHEDULES
@pytest.mark.parametrize(
    "options",
    [
        {"accumulation_steps": 3},
        {"find_unused_parameters": True},
        {"skip_nonfinite": True, "accumulation_steps": 2},
        {"hook": fddp.hooks.bf16()},
        {"bucket_cap_mb": 25},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_do_what_they_do_without(
    group: Groups, x64: None, schedule: str, options: dict[str, Any]
):
    results = []
    for reshard in (True, False):
        step = resharded_step(
            deep, group(2), schedule=schedule, reshard_after_forward=reshard, **options
        )
        state = step.init(weights())
        state, _ = step(state, ROWS)
        state, info = step(state, ROWS + 1)
        results.append((fddp.whole(state), info._replace(sent=None)))
    close(*results)


def test_what_is_pending_after_no_sync_is_added(group: Groups, x64: None):
    step = resharded_step(deep, group(2))
    state, _ = step.no_sync(step.init(weights()), ROWS[:12])
    state, _ = step(state, ROWS[12:])
    close(fddp.whole(state.params), by_plain_jax(deep, ADAM, weights(), [ROWS]).params)


def test_a_batch_norm_keeps_its_statistics(group: Groups, x64: None):
    """Buffers leave the forward pass: no parameter is gathered again for them."""

    def loss(p: Any, x: Any, *, model_state: Any) -> Any:
        x = jnp.tanh(x @ p["w0"])
        model_state = 0.9 * model_state + 0.1 * jnp.mean(x, axis=0)
        return jnp.mean((x @ p["w1"] - 1) ** 2), (model_state, None)

    results = []
    for reshard in (True, False):
        step = resharded_step(
            loss, group(2), reshard_after_forward=reshard, broadcast_buffers="mean"
        )
        state = step.init(
            {name: weights()[name] for name in ("w0", "w1")}, model_state=np.zeros(WIDTH)
        )
        for k in range(2):
            state, _ = step(state, ROWS + k)
        results.append(fddp.whole(state))
    close(*results)


@SCHEDULES
def test_each_bucket_is_gathered_for_each_pass_but_one_that_both_read_together(
    group: Groups, schedule: str
):
    step = resharded_step(deep, group(4), schedule=schedule)
    params = {name: np.asarray(w, np.float32) for name, w in weights().items()}
    _, info = step(step.init(params), np.asarray(ROWS, np.float32))
    nbytes = dict(
        zip([bucket.names for bucket in step.plan.buckets], np.asarray(info.sent).tolist())
    )
    part = 3 * 4 * WIDTH * WIDTH // 4  # of four replicas each sends its part to three
    # Scattered once; w3 stays, as it is read last and first.
    assert nbytes == {("w3",): 2 * part, ("w2",): 3 * part, ("w1",): 3 * part, ("w0",): 2 * part}


def test_no_more_than_two_buckets_are_whole_at_once(group: Groups):
    counts = []
    for reshard in (True, False):
        step = resharded_step(deep, group(2), schedule="staged", reshard_after_forward=reshard)
        state = step.init({name: np.asarray(w, np.float32) for name, w in weights().items()})
        rows = np.asarray(ROWS, np.float32)
        counts.append(most_whole(step, state, rows))
    assert counts == [2, 4]


def most_whole(step: fddp.TrainStep, state: Any, rows: Any) -> int:
    """The largest number of whole weights alive between two tasks of the forward pass."""
    listed = step.tasks(state, rows)
    equal, shards = take_apart(state)
    of_one = of_one_replica((shards, rows), 2)
    values = dict(listed.enter(equal, None, *of_one))
    last = {value: at for at, task in enumerate(listed.tasks) for value in task.reads}
    most = 0
    for at, task in enumerate(listed.tasks):
        if task.name == "tail":  # behind it gradients are there, which have the same size
            return most
        read = [values[name] for name in task.reads]
        if isinstance(task, Communicate) or task.speaks:
            outputs = [doubled(x) for x in read]
        else:
            outputs = trace(step.group.placement, task.run, *read)[1]
        values.update(zip(task.writes, outputs))
        gathered = [
            x for name, x in values.items() if x.size == WIDTH * WIDTH and last.get(name, 0) > at
        ]
        most = max(most, len(gathered))
    raise AssertionError(f"no message of loss and metrics: {listed}")


def doubled(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The gathered array of two replicas."""
    return jax.ShapeDtypeStruct((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)


def test_it_is_for_parameters_that_rest_in_shards(group: Groups):
    for shard in (None, "optimizer"):
        with pytest.raises(
            ValueError, match=r"drops parameters that rest in shards.*give shard='state'"
        ):
            resharded_step(deep, group(2), shard=shard)
    with pytest.raises(ValueError, match="reshard_after_forward must be True or False, got 1"):
        resharded_step(deep, group(2), reshard_after_forward=1)
