"""Islands of several replicas: ordinary steps inside, local steps between, as a loop over islands
does them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import close, same_bits

import fddp
from fddp.schedules import Communicate

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(5)
PARAMS = {"w": DRAW.normal(size=(3, 5)), "b": DRAW.normal(size=5)}
BATCHES = DRAW.normal(size=(6, 16, 3))
OUTER: dict[str, tuple[float, float, bool]] = {
    "local SGD": (1.0, 0.0, False),
    "SlowMo": (1.0, 0.5, False),
    "DiLoCo": (0.7, 0.9, True),
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "staged": {"schedule": "staged"},
    "optimizer": {"shard": "optimizer"},
    "state": {"shard": "state", "schedule": "staged"},
}


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - 1) ** 2)


def gradient(p: Any, x: np.ndarray) -> Any:
    """The gradient of the loss, in NumPy."""
    h = np.tanh(x @ p["w"] + p["b"])
    delta = 2 * (h - 1) * (1 - h**2) / h.size
    return {"w": x.T @ delta, "b": delta.sum(0)}


def by_hand(every: int, rate: float, momentum: float, nesterov: bool, islands: int = 2) -> Any:
    """Islands of plain descent, each on its share of the rows, and the outer optimizer: in
    NumPy."""
    shared = {name: np.array(x) for name, x in PARAMS.items()}
    speed = {name: np.zeros_like(x) for name, x in PARAMS.items()}
    local = [dict(shared) for _ in range(islands)]
    for number, batch in enumerate(BATCHES, start=1):
        for k, rows in enumerate(np.split(batch, islands)):
            grads = gradient(local[k], rows)
            local[k] = {name: local[k][name] - 0.1 * grads[name] for name in shared}
        if number % every == 0:
            for name in shared:
                change = shared[name] - np.mean([params[name] for params in local], axis=0)
                speed[name] = momentum * speed[name] + change
                shared[name] = shared[name] - rate * (
                    change + momentum * speed[name] if nesterov else speed[name]
                )
            local = [dict(shared) for _ in range(islands)]
    return {name: np.mean([params[name] for params in local], axis=0) for name in shared}, shared


def trained(
    group: fddp.Group, local: Any, inner: Any = None, **options: Any
) -> tuple[Any, list[list[int]]]:
    optimizer = fddp.local_steps(inner or optax.sgd(0.1), **local)
    options = {"bucket_cap_mb": 0, **options}
    step = fddp.train_step(loss_fn, optimizer, group=group, **options)
    state = step.init(PARAMS)
    nbytes = []
    for batch in BATCHES:
        state, info = step(state, batch)
        nbytes.append(info.sent.tolist())
    return state, nbytes


@pytest.mark.quick("local SGD-whole", "DiLoCo-optimizer", "SlowMo-staged")
@crossed(method=list(OUTER), way=WAYS)
def test_two_islands_of_two_are_what_a_loop_over_islands_does(
    group: Groups, x64: None, method: str, way: Any
):
    rate, momentum, nesterov = OUTER[method]
    outer = optax.sgd(rate, momentum=momentum or None, nesterov=nesterov)
    state, _ = trained(group(4), {"outer": outer, "every": 4, "island": 2}, **way)
    params, shared = by_hand(4, rate, momentum, nesterov)
    close(jax.device_get(fddp.whole(state.params)), params, rtol=0, atol=1e-10)
    close(jax.device_get(state.opt_state.shared), shared, rtol=0, atol=1e-10)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fragments": ({"every": 2, "fragments": 2}, {"shard": "optimizer"}),
    "delay": ({"every": 2, "delay": 1, "mix": 0.5}, {"schedule": "staged"}),
    "delay, in shards": (
        {"every": 2, "delay": 1, "fragments": 2},
        {"shard": "state", "accumulation_steps": 2},
    ),
    "start": ({"every": 2, "start": 3}, {"shard": "optimizer"}),
    "a period that grows": ({"every": lambda step: 1 + step // 2}, {}),
}


@pytest.mark.quick("delay, in shards", "a period that grows")
@pytest.mark.parametrize("case", CASES)
def test_an_island_is_as_good_as_one_replica_with_its_rows(group: Groups, x64: None, case: str):
    """Two islands of two are two replicas, on the same halves of the rows."""
    local, options = CASES[case]
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    adam = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05))
    single, _ = trained(group(2), {"outer": outer, **local}, adam)
    islands, _ = trained(group(4), {"outer": outer, "island": 2, **local}, adam, **options)
    got, expected = (jax.device_get(fddp.whole(x)) for x in (islands, single))
    pairs = [
        (x.params, x.opt_state.shared, x.opt_state.outer, x.opt_state.inner)
        for x in (got, expected)
    ]
    close(*pairs, rtol=0, atol=1e-10)


def test_islands_are_the_nodes_of_a_group(group: Groups, x64: None):
    local = {"outer": optax.sgd(0.7), "every": 3}
    nodes, _ = trained(group(4).hierarchical(2), {**local, "island": "node"})
    islands, _ = trained(group(4), {**local, "island": 2})
    close(nodes, islands, rtol=0, atol=0)


@pytest.mark.quick("1-two levels", "2-three")
@pytest.mark.parametrize("every", [2, {"params": 4, "node": 2}], ids=["two levels", "three"])
@pytest.mark.parametrize("island", [1, 2])
def test_the_same_step_on_other_replicas_knows_their_islands(
    group: Groups, island: int, every: Any
):
    def nodes(group: fddp.Group) -> fddp.Group:
        return group if every == 2 else group.hierarchical(4)

    optimizer = fddp.local_steps(optax.sgd(0.1), every=every, island=island)
    step = fddp.train_step(loss_fn, optimizer, group=nodes(group(4)), bucket_cap_mb=0).on(
        nodes(group(8))
    )
    state = step.init(PARAMS)
    for batch in BATCHES:
        state, _ = step(state, batch)
    same_bits(state, trained(nodes(group(8)), {"every": every, "island": island})[0])


def test_one_island_of_all_replicas_is_lookahead(group: Groups, x64: None):
    state, _ = trained(group(4), {"outer": optax.sgd(0.5), "every": 3, "island": 4})
    params, _ = by_hand(3, 0.5, 0.0, False, islands=1)
    close(jax.device_get(fddp.whole(state.params)), params, rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_between_islands_each_parameter_travels_once(group: Groups, x64: None, schedule: str):
    """Islands of four: a replica sends a quarter of the pseudo-gradient to the other island."""
    _, nbytes = trained(group(8), {"every": 2, "island": 4}, schedule=schedule)
    names = [bucket.names[0] for bucket in fddp.make_plan(PARAMS, bucket_cap_mb=0).buckets]
    size = {"b": 5, "w": 15}
    for inner_bytes, outer_bytes in (nbytes[:2], nbytes[2:4]):
        more = np.subtract(outer_bytes, inner_bytes)
        part = [-(-size[name] // 4) for name in names]
        # 2 · 1/2 of a part between islands, 3 parts gathered inside; also weight and count.
        assert more[: len(part)].sum() - sum(8 * (n + 3 * n) for n in part) in (0, 8)


def test_the_network_carries_sums_of_parts_alone(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=1, island=2)
    step = fddp.train_step(loss_fn, optimizer, group=group(4), schedule="fused", bucket_cap_mb=0)
    state = step.init(PARAMS)
    levels = [(task.reduction.level, task.name) for task in step.tasks(state, BATCHES[0]).messages]
    assert {level for level, _ in levels} == {"node", "network"}
    compiled = step.lower(state, BATCHES[0]).compile().as_text() or ""
    sums = [line for line in compiled.splitlines() if " all-reduce(" in line]
    between = [line for line in sums if "{{0,2},{1,3}}" in line]
    assert len(between) == 2 and all(
        "{{0,1},{2,3}}" in line for line in sums if line not in between
    )


def test_a_replica_alone_still_sends_nothing_between_two_synchronizations(group: Groups):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=2, island=1)
    step = fddp.train_step(loss_fn, optimizer, group=group(4), schedule="staged")
    state, _ = step(step.init(PARAMS), BATCHES[0])
    (message,) = [
        task for task in step.tasks(state, BATCHES[1]).tasks if isinstance(task, Communicate)
    ]
    assert message.reduction.level == "all"


@pytest.mark.quick("state")
@pytest.mark.parametrize("shard", [None, "optimizer", "state"])
def test_a_checkpoint_between_synchronizations_goes_on_bit_for_bit(
    group: Groups, tmp_path: Path, shard: Any
):
    def make() -> fddp.TrainStep:
        noisy = optax.chain(
            optax.add_noise(0.01, 0.55, key=0), optax.adam(0.05)
        )  # its state has a random key
        local = fddp.local_steps(noisy, outer=optax.sgd(0.7), every=4, island=2)
        return fddp.train_step(loss_fn, local, group=group(4), shard=shard)

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
    same_bits(restored_state, state)


@pytest.mark.parametrize("shard", [None, "state"])
def test_no_sync_and_micro_batches_come_before_an_islands_own_step(
    group: Groups, x64: None, shard: Any
):
    optimizer = fddp.local_steps(optax.sgd(0.1), every=2, island=2)
    step = fddp.train_step(loss_fn, optimizer, group=group(4), shard=shard)
    state = step.init(PARAMS)
    first, two = np.split(BATCHES[0].reshape(4, 4, 3), 2, axis=1)
    state, _ = step.no_sync(state, first.reshape(-1, 3))
    state, _ = step(state, two.reshape(-1, 3))
    reference = fddp.train_step(loss_fn, optimizer, group=group(4))
    _ = None
    expected, _ = reference(reference.init(PARAMS), BATCHES[0])
    close(
        jax.device_get(fddp.whole(state.params)),
        jax.device_get(fddp.whole(expected.params)),
        rtol=0,
        atol=1e-10,
    )


def test_a_wire_of_16_bits_carries_gradients_inside_and_changes_between(group: Groups):
    local = {"every": 2, "island": 2}
    for way in ({}, {"shard": "state"}):
        hooked, _ = trained(group(4), local, hook=fddp.hooks.bf16(), **way)
        plain, _ = trained(group(4), local, **way)
        close(fddp.whole(hooked.params), fddp.whole(plain.params), rtol=2e-2, atol=2e-2)


def test_what_islands_cannot_be_is_refused(group: Groups):
    def island_step(on: fddp.Group, island: Any, **options: Any) -> Any:
        return fddp.train_step(
            loss_fn, fddp.local_steps(optax.sgd(0.1), island=island), group=on, **options
        )

    with pytest.raises(ValueError, match="a divisor of the 4 of this group; got 3"):
        island_step(group(4), 3)
    with pytest.raises(ValueError, match="island='node' needs a group with nodes"):
        island_step(group(4), "node")
    with pytest.raises(ValueError, match="island=4, and the nodes of this group have 2 replicas"):
        island_step(group(4).hierarchical(2), 4)
    with pytest.raises(
        ValueError, match=r"fddp\.local_steps without island does not work with shard"
    ):
        island_step(group(4), 1, shard="state")
    with pytest.raises(
        ValueError, match=r"fddp\.local_steps with island does not work with schedule='eager'"
    ):
        island_step(group(4), 2, schedule="eager")
    delayed = fddp.local_steps(optax.sgd(0.1), island=2, start=1)
    with pytest.raises(ValueError, match="start=1 does not work with shard='state'"):
        fddp.train_step(loss_fn, delayed, group=group(4), shard="state").init(PARAMS)
    for island in (0, 1.5, "host", True):
        with pytest.raises((ValueError, TypeError), match="island"):
            fddp.local_steps(optax.sgd(0.1), island=island)  # type: ignore
