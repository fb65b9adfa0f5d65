"""Own periods for the parts of a state, and means over a node: held against loops over islands, in
NumPy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import close

import fddp

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(5)
PARAMS = {"b": DRAW.normal(size=5), "s": np.array(0.5), "w": DRAW.normal(size=(3, 5))}
BATCHES = DRAW.normal(size=(9, 16, 3))
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
BETA = {"mu": 0.9, "nu": 0.999}
RATE = 0.05
PERIODS = {"params": 2, "mu": 4, "nu": 8}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"schedule": "fused"},
    "staged": {"schedule": "staged"},
    "optimizer": {"shard": "optimizer"},
    "state": {"shard": "state", "schedule": "staged"},
}


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((p["s"] * jnp.tanh(x @ p["w"] + p["b"]) - 1) ** 2)


def gradient(p: Any, x: np.ndarray) -> Any:
    """The gradient of the loss, in NumPy."""
    h = np.tanh(x @ p["w"] + p["b"])
    out = 2 * (p["s"] * h - 1) / h.size
    delta = out * p["s"] * (1 - h**2)
    return {"b": delta.sum(0), "s": np.sum(out * h), "w": x.T @ delta}


def mean_of(trees: Any) -> Any:
    return {name: np.mean([tree[name] for tree in trees], axis=0) for name in trees[0]}


def by_hand(
    islands: int,
    every: Mapping[str, int],
    *,
    node: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    start: int = 0,
) -> Any:
    """Islands of Adam, each on its share of the rows; DES-LOC's means, those of nodes and the outer
    optimizer."""
    shared = {name: np.array(x) for name, x in PARAMS.items()}
    speed = {name: np.zeros_like(x) for name, x in shared.items()}
    local = [dict(shared) for _ in range(islands)]
    moments: Any = {
        key: [{name: np.zeros_like(x) for name, x in shared.items()} for _ in local] for key in BETA
    }
    for number, batch in enumerate(BATCHES, start=1):
        before = [dict(params) for params in local]
        moments_before = {
            key: [dict(moment) for moment in replica_moments]
            for key, replica_moments in moments.items()
        }
        grads = [gradient(params, rows) for params, rows in zip(local, np.split(batch, islands))]
        grads = [mean_of(grads)] * islands if number <= start else grads
        for k, grad in enumerate(grads):
            for key, power in (("mu", 1), ("nu", 2)):
                moment = moments[key][k]
                moments[key][k] = {
                    n: BETA[key] * moment[n] + (1 - BETA[key]) * grad[n] ** power for n in moment
                }
            first, second = (moments[key][k] for key in BETA)
            corrected = {n: first[n] / (1 - BETA["mu"] ** number) for n in first}
            roots = {n: np.sqrt(second[n] / (1 - BETA["nu"] ** number)) for n in first}
            local[k] = {n: local[k][n] - RATE * corrected[n] / (roots[n] + 1e-8) for n in first}
        if number <= start:
            shared = dict(local[0])
            continue
        local_count = number - start - delay
        due = [
            part for part, period in every.items() if local_count > 0 and local_count % period == 0
        ]
        snapshot = before if delay else local
        for key in set(due) & set(BETA):
            moments[key] = [mean_of(moments_before[key] if delay else moments[key])] * islands
        if "params" in due:
            mean = mean_of(snapshot)
            for n in shared:
                change = shared[n] - mean[n]
                speed[n] = 0.9 * speed[n] + change
                shared[n] = shared[n] - 0.7 * (change + 0.9 * speed[n])
            local = [
                {n: shared[n] + mix * (params[n] - shared[n]) for n in shared} for params in local
            ]
        elif "node" in due:
            means = [
                mean_of(snapshot[first : first + node])
                for first in range(0, islands, node)
                for _ in range(node)
            ]
            local = [
                {n: mean[n] + mix * (params[n] - mean[n]) for n in shared}
                for params, mean in zip(local, means)
            ]
    return local, shared, moments


def trained(
    group: fddp.Group, local: Any, inner: Any = None, **options: Any
) -> tuple[Any, list[int]]:
    optimizer = fddp.local_steps(inner or optax.adam(RATE), outer=OUTER, **local)
    options = {"bucket_cap_mb": 0, **options}
    step = fddp.train_step(loss_fn, optimizer, group=group, **options)
    state = step.init(PARAMS)
    nbytes = []
    for batch in BATCHES:
        state, info = step(state, batch)
        nbytes.append(int(info.sent.sum()))
    return state, nbytes


def check(state: Any, hand: Any, moments: Callable[[Any], Any] = lambda inner: inner[0]) -> None:
    """Compares shared parameters, and the means over islands of parameters and moments."""
    local, shared, means = hand
    gathered = jax.device_get(fddp.whole(state))
    close(gathered.opt_state.shared, shared, rtol=0, atol=1e-10)
    close(gathered.params, mean_of(local), rtol=0, atol=1e-10)
    adam = moments(gathered.opt_state.inner)
    close((adam.mu, adam.nu), tuple(mean_of(means[key]) for key in BETA), rtol=0, atol=1e-10)


@pytest.mark.quick("", "start")
@pytest.mark.parametrize(
    "local", [{}, {"delay": 1, "mix": 0.5}, {"start": 3}], ids=["", "delay", "start"]
)
def test_four_replicas_average_each_moment_at_its_own_period(group: Groups, x64: None, local: Any):
    periods: Any = {"params": 2, "mu": 3, "nu": 5}
    state, _ = trained(group(4), {"every": periods, **local})
    hand = by_hand(4, periods, **local)
    check(state, hand)
    copies = state.params["w"].parts.reshape(4, 3, 5)
    close(copies, np.stack([params["w"] for params in hand[0]]), rtol=0, atol=1e-10)


@pytest.mark.quick("whole", "optimizer")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_two_islands_of_two_average_each_moment_at_its_own_period(
    group: Groups, x64: None, way: Any
):
    state, _ = trained(group(4), {"every": PERIODS, "island": 2}, **way)
    check(state, by_hand(2, PERIODS))


def test_islands_in_shards_average_what_they_had_before_a_step(group: Groups, x64: None):
    local: Any = {"every": {"params": 4, "mu": 2, "nu": 3}, "delay": 1, "mix": 0.5}
    state, _ = trained(group(4), {**local, "island": 2}, shard="optimizer", schedule="staged")
    check(state, by_hand(2, **local))


def test_equal_periods_of_all_parts_average_the_whole_state(group: Groups, x64: None):
    """Local Adam: after each mean all replicas equal a single one that holds the mean of all their
    states."""
    optimizer = fddp.local_steps(optax.adam(RATE), every={"params": 3, "mu": 3, "nu": 3})
    step = fddp.train_step(loss_fn, optimizer, group=group(2))
    state = step.init(PARAMS)
    adam = optax.adam(RATE)
    local: Any = [(jax.tree.map(jnp.asarray, PARAMS), adam.init(PARAMS)) for _ in range(2)]
    for number, batch in enumerate(BATCHES, start=1):
        state, _ = step(state, batch)
        for k, rows in enumerate(np.split(batch, 2)):
            params, moments = local[k]
            updates, moments = adam.update(jax.grad(loss_fn)(params, rows), moments, params)
            local[k] = optax.apply_updates(params, updates), moments
        if number % 3 == 0:
            mean = jax.tree.map(
                lambda *x: jnp.mean(jnp.stack(x), axis=0).astype(x[0].dtype), *local
            )
            local = [mean, mean]
    gathered = fddp.whole(state)
    close((gathered.params, gathered.opt_state.inner), local[0], rtol=0, atol=1e-10)


def test_a_field_is_found_wherever_it_stands_in_the_state(group: Groups, x64: None):
    inner = optax.chain(
        optax.clip_by_global_norm(1e3),
        optax.MultiSteps(optax.adam(RATE), 1).gradient_transformation(),
    )
    state, _ = trained(group(2), {"every": PERIODS}, inner)
    check(state, by_hand(2, PERIODS), lambda inner: inner[1].inner_opt_state[0])
    # Two optimizers, each of its own leaves, have one each: all are meant.
    labels = {"b": "one", "s": "other", "w": "other"}
    transforms = optax.multi_transform({"one": optax.adam(RATE), "other": optax.adam(RATE)}, labels)
    ways: Any = ({}, {"island": 2})
    for options in ways:
        state, _ = trained(
            group(2 * options.get("island", 1)), {"every": PERIODS, **options}, transforms
        )
        gathered = jax.device_get(fddp.whole(state))
        close(gathered.params, mean_of(by_hand(2, PERIODS)[0]), rtol=0, atol=1e-10)


def test_fields_of_the_parameters_are_none_of_the_state(group: Groups):
    class Latent(NamedTuple):
        mu: Any
        nu: Any

    params = Latent(np.float32(0), np.float32(0))
    optimizer = fddp.local_steps(optax.sgd(0.1, momentum=0.9), every={"params": 2, "mu": 2})
    step = fddp.train_step(lambda p, x: jnp.mean((x - p.mu - p.nu) ** 2), optimizer, group=group(2))
    with pytest.raises(ValueError, match="a field of the state: 'trace'"):
        step.init(params)


def test_moments_go_with_fragments(group: Groups, x64: None):
    """The outer optimizer has no momentum, so fragments that leave together are equal to one
    fragment."""
    periods = {"params": 3, "mu": 2, "nu": 4}
    inner = optax.adam(RATE)
    outer = optax.sgd(1.0)
    local: Any = [(jax.tree.map(jnp.asarray, PARAMS), inner.init(PARAMS)) for _ in range(2)]
    step = fddp.train_step(
        loss_fn,
        fddp.local_steps(inner, outer=outer, every=periods, fragments=3),
        group=group(2),
        bucket_cap_mb=0,
    )
    state = step.init(PARAMS)
    for number, batch in enumerate(BATCHES, start=1):
        state, _ = step(state, batch)
        for k, rows in enumerate(np.split(batch, 2)):
            params, moments = local[k]
            updates, moments = inner.update(jax.grad(loss_fn)(params, rows), moments, params)
            local[k] = optax.apply_updates(params, updates), moments
        turn = step.plan.buckets[number % 3].names
        mean: Any = jax.tree.map(
            lambda *x: jnp.mean(jnp.stack(x), axis=0).astype(x[0].dtype), *local
        )
        for k, (params, moments) in enumerate(local):
            params = {name: mean[0][name] if name in turn else x for name, x in params.items()}
            adam = moments[0]
            adam = adam._replace(mu=mean[1][0].mu) if number % 2 == 0 else adam
            adam = adam._replace(nu=mean[1][0].nu) if number % 4 == 0 else adam
            local[k] = params, (adam, *moments[1:])
    expected = jax.tree.map(
        lambda *x: np.mean(x, axis=0), *[(params, m[0].mu, m[0].nu) for params, m in local]
    )
    gathered = fddp.whole(state)
    adam = gathered.opt_state.inner[0]
    close((gathered.params, adam.mu, adam.nu), expected, rtol=0, atol=1e-10)


### Three levels


@pytest.mark.quick("no divisor-1")
@crossed(node={"a divisor": 2, "no divisor": 3}, delay=[0, 1])
def test_replicas_of_a_node_average_parameters_beside_the_outer_optimizer(
    group: Groups, x64: None, node: int, delay: int
):
    local: Any = {"every": {"params": 4, "node": node, "mu": 8}, "delay": delay, "mix": 0.5 * delay}
    state, _ = trained(group(4).hierarchical(2), local)
    hand = by_hand(4, **local, node=2)
    check(state, hand)
    close(
        state.params["w"].parts.reshape(4, 3, 5),
        np.stack([params["w"] for params in hand[0]]),
        rtol=0,
        atol=1e-10,
    )


@pytest.mark.quick("whole")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_islands_of_a_node_average_parameters_of_the_same_place(group: Groups, x64: None, way: Any):
    local: Any = {"every": {"params": 6, "node": 2, "nu": 4}}
    state, _ = trained(group(8).hierarchical(4), {**local, "island": 2}, **way)
    check(state, by_hand(4, **local, node=2))


def test_with_fragments_a_node_averages_all_parameters(group: Groups, x64: None):
    """All replicas on one node: its mean, after every step, is data-parallel training by plain
    descent."""
    every = {"params": 3, "node": 1}
    optimizer = fddp.local_steps(optax.sgd(0.1), every=every, fragments=3)
    step = fddp.train_step(loss_fn, optimizer, group=group(4).hierarchical(4), bucket_cap_mb=0)
    plain = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(4))
    state = step.init(PARAMS)
    expected = plain.init(PARAMS)
    for batch in BATCHES:
        state, _ = step(state, batch)
        expected, _ = plain(expected, batch)
    close(fddp.whole(state.params), expected.params, rtol=0, atol=1e-10)


@pytest.mark.quick("node")
@pytest.mark.parametrize("island", [4, "node"])
def test_a_node_of_one_island_has_its_own_mean(group: Groups, x64: None, island: Any):
    nodes = group(8).hierarchical(4)
    in_parts, _ = trained(nodes, {"every": {"params": 3, "node": 2}, "island": island})
    at_once, _ = trained(nodes, {"every": 3, "island": "node"})
    close(fddp.whole(in_parts.params), fddp.whole(at_once.params), rtol=0, atol=1e-10)


def test_who_is_neighbour_of_whom(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every={"params": 4, "node": 1}, island=2)
    step = fddp.train_step(
        loss_fn, optimizer, group=group(8).hierarchical(4), schedule="fused", bucket_cap_mb=0
    )
    state = step.init(PARAMS)
    messages = [
        (task.reduction.level, task.name) for task in step.tasks(state, BATCHES[0]).messages
    ]
    assert {level for level, name in messages if name.startswith("node")} == {"neighbours"}
    compiled = step.lower(state, BATCHES[0]).compile().as_text() or ""
    assert "{{0,2},{1,3},{4,6},{5,7}}" in compiled and "{{0,2,4,6},{1,3,5,7}}" not in compiled


### Weights and bytes


def test_a_replica_weighs_in_a_mean_as_much_as_it_has_trained_on_since_the_last_one(
    group: Groups, x64: None
):
    def loss(w: Any, x: Any) -> Any:
        return fddp.Weighted(jnp.mean((x - w) ** 2), jnp.sum(x))

    optimizer = fddp.local_steps(
        optax.sgd(0.25, momentum=0.5), every={"params": 2, "trace": 3, "node": 1}
    )
    step = fddp.train_step(loss, optimizer, group=group(2).hierarchical(2))
    state = step.init(np.float64(0))
    local = np.zeros(2)
    speed = np.zeros(2)
    rows = np.array([[1.0, 3], [2, 4], [5, 1], [1, 1]])
    for number, x in enumerate(rows, start=1):
        state, _ = step(state, x)
        speed = 0.5 * speed - 2 * (x - local)
        local = local - 0.25 * speed
        since = rows[number - 2 : number].sum(axis=0) if number % 2 == 0 else x
        local[:] = np.average(local, weights=since)
        if number == 3:
            speed[:] = np.average(speed, weights=rows[:3].sum(axis=0))
    np.testing.assert_allclose(state.params.parts.ravel(), local, rtol=1e-12)
    np.testing.assert_allclose(state.opt_state.inner[0].trace.parts.ravel(), speed, rtol=1e-12)


def test_moments_stay_where_nobody_has_trained(group: Groups):
    optimizer = fddp.local_steps(optax.adam(0.1), every={"params": 1, "mu": 1, "nu": 1, "node": 1})
    for local in (1, 2):
        step = fddp.train_step(
            lambda w, x: jnp.mean(w * x),
            optimizer,
            group=group(2).hierarchical(local),
            skip_nonfinite=True,
        )
        state, _ = step(step.init(np.float32(1)), np.array([1, 2], np.float32))
        before = jax.device_get(fddp.whole(state))
        after = jax.device_get(fddp.whole(step(state, np.full(2, np.inf, np.float32))[0]))
        assert after.opt_state.inner[0].mu == before.opt_state.inner[0].mu != 0
        assert after.opt_state.inner[0].nu == before.opt_state.inner[0].nu != 0
        assert after.params == before.params


def test_the_bytes_of_each_part_are_those_counted_by_hand(group: Groups):
    """Each of two replicas sends as many bytes as a message has; each part brings a weight."""
    floats = 4 * 21
    weight = 4
    step = fddp.train_step(
        loss_fn, fddp.local_steps(optax.adam(RATE), every=PERIODS), group=group(2)
    )
    state = step.init(jax.tree.map(np.float32, PARAMS))
    nbytes = []
    for batch in BATCHES.astype(np.float32)[:8]:
        state, info = step(state, batch)
        nbytes.append(int(info.sent.sum()))
    message = floats + weight
    assert nbytes == [0, message, 0, 2 * message, 0, message, 0, 3 * message]


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_between_islands_each_moment_travels_once(group: Groups, shard: Any):
    """Islands of two: a replica sends half of a moment between islands; a half in shards is not
    gathered."""
    params = jax.tree.map(np.float32, PARAMS)
    nbytes = {}
    periods: Any = (100, {"params": 100, "mu": 1})
    for every in periods:
        optimizer = fddp.local_steps(optax.adam(RATE), every=every, island=2)
        step = fddp.train_step(loss_fn, optimizer, group=group(4), shard=shard)
        _, info = step(step.init(params), BATCHES[0].astype(np.float32))
        nbytes[str(every)] = int(info.sent.sum())
    half = 3 + 1 + 8  # of 5, 1 and 15 numbers; a single number is whole on both
    params_bytes, more = nbytes.values()
    assert more - params_bytes == 4 * (half + 1) + (0 if shard else 4 * half)


@pytest.mark.parametrize("hook", ["nothing", "topk"])
def test_a_hook_sums_pseudo_gradients_alone(group: Groups, hook: str):
    """If few bits rounded a second moment to zero, an update would divide by it."""
    nothing = fddp.Hook(
        lambda leaf: (), lambda comm, bucket, memory: (jnp.zeros_like(bucket.buffer), memory)
    )
    optimizer = fddp.local_steps(optax.adam(RATE), every={"params": 2, "node": 1, "nu": 1})
    options: Any = {"hook": nothing if hook == "nothing" else fddp.hooks.topk(0.01)}
    step = fddp.train_step(loss_fn, optimizer, group=group(4).hierarchical(2), **options)
    state, _ = step(step.init(jax.tree.map(np.float32, PARAMS)), BATCHES[0])
    rows = state.params["w"].parts.reshape(4, -1)
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.any(rows[0] != rows[2]) and np.any(rows[0] != np.float32(PARAMS["w"].ravel()))
    state, _ = step(state, BATCHES[1])
    assert all(np.all(x > 0) for x in jax.tree.leaves(fddp.whole(state.opt_state.inner[0].nu)))
    if hook == "nothing":
        close(state.opt_state.shared, jax.tree.map(np.float32, PARAMS), rtol=0, atol=0)


### Unchanged and refused options


@pytest.mark.quick("state")
@pytest.mark.parametrize("shard", [None, "state"])
def test_a_checkpoint_between_two_means_goes_on_bit_for_bit(
    group: Groups, tmp_path: Path, shard: Any
):
    def make() -> fddp.TrainStep:
        every = {"params": 4, "node": 2, "mu": 4, "nu": 7}
        local = fddp.local_steps(optax.adam(RATE), outer=OUTER, every=every, island=2)
        return fddp.train_step(loss_fn, local, group=group(8).hierarchical(4), shard=shard)

    step = make()
    state = step.init(PARAMS)
    for batch in BATCHES[:3]:
        state, _ = step(state, batch)
    with fddp.Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state, now=True)
    second_step = make()
    with fddp.Checkpoints(tmp_path, second_step) as checkpoints:
        restored_state, _ = checkpoints.restore(second_step.init(PARAMS))
    for batch in BATCHES[3:]:
        state, _ = step(state, batch)
        restored_state, _ = second_step(restored_state, batch)
    close(restored_state, state, rtol=0, atol=0)


def test_parameters_alone_in_a_mapping_are_one_period(group: Groups):
    periods: Any = (3, {"params": 3}, {"params": lambda step: 3})
    results = [trained(group(2), {"every": every}) for every in periods]
    for end in results[1:]:
        close(end, results[0], rtol=0, atol=0)


def test_periods_that_cannot_be_are_refused(group: Groups):
    wrong: Any = (
        ({}, "every must have the period of the parameters, 'params', got {}"),
        ({"mu": 3}, "every must have the period of the parameters"),
        ({"params": 0}, r"every\['params'\] must be a whole number of 1 or more, got 0"),
        ({"params": 2, "mu": 1.5}, r"every\['mu'\] must be a whole number of 1 or more, got 1.5"),
        ({"params": 2, "mu": abs}, r"every\['mu'\] must be a whole number"),
    )
    for every, words in wrong:
        with pytest.raises(ValueError, match=words):
            fddp.local_steps(optax.adam(0.1), every=every)
    with pytest.raises(
        ValueError, match=r"delay=1 needs more than one step .* got every\['mu'\]=1"
    ):
        fddp.local_steps(optax.adam(0.1), every={"params": 2, "mu": 1}, delay=1)
    with pytest.raises(TypeError, match="the name of a part must be a str, got 3"):
        fddp.local_steps(optax.adam(0.1), every={"params": 2, 3: 4})  # pyright: ignore[reportArgumentType]
    unknown = fddp.local_steps(optax.adam(0.1), every={"params": 2, "count": 4})
    with pytest.raises(
        ValueError, match=r"has a period of 'count', .* a field of the state: 'mu', 'nu'"
    ):
        fddp.train_step(loss_fn, unknown, group=group(2)).init(PARAMS)
    none = fddp.local_steps(optax.sgd(0.1), every={"params": 2, "mu": 4})
    with pytest.raises(ValueError, match="a field of the state: none"):
        fddp.train_step(loss_fn, none, group=group(2)).init(PARAMS)
    node = fddp.local_steps(optax.adam(0.1), every={"params": 4, "node": 2})
    with pytest.raises(ValueError, match=r"a period of 'node', which needs a group with nodes"):
        fddp.train_step(loss_fn, node, group=group(4))
    with pytest.raises(ValueError, match="island=3, and the nodes of this group have 4 replicas"):
        fddp.train_step(
            loss_fn, fddp.local_steps(optax.sgd(0.1), island=3), group=group(8).hierarchical(4)
        )
