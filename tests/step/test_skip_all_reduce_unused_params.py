"""Layers that every replica drops cost no traffic (paper, section 6.2.2: not so in DDP).

Where ranks are processes it is tested in `on_ranks/unused.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_schedule import SCHEDULES
from trees import close

import fddp
from fddp import hooks

pytestmark = pytest.mark.steps

REPLICAS = 4
LAYERS = 5
WIDTH = 6
RNG = np.random.default_rng(4)
X = RNG.normal(size=(16, WIDTH)).astype(np.float32)
PARAMS = {
    f"layer{k}": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 3 for k in range(LAYERS)
}
MASK = 4 * LAYERS  # a float for each leaf
TAIL = 3 * 4  # loss, weight and a metric
ONE = 4 * WIDTH**2


def network(params: Any, x: Any, mask: Any) -> Any:
    """A residual network that leaves out the layers with a false `mask`."""
    for k in range(LAYERS):
        x = x + jax.lax.cond(
            mask[k],
            lambda x, w: jnp.tanh(x @ w),
            lambda x, w: jnp.zeros_like(x),
            x,
            params[f"layer{k}"],
        )
    return jnp.mean(x**2)


def dropping(params: Any, x: Any, *, rng: Any) -> Any:
    mask = jax.random.bernoulli(rng, 0.5, (LAYERS,))
    return network(params, x, mask), {"kept": jnp.sum(mask * 1.0)}


def steps(
    group: Any, shared: bool, schedule: Any, count: int = 4, **options: Any
) -> tuple[Any, list[fddp.StepInfo]]:
    key = jax.random.key(7)
    step = fddp.train_step(
        dropping,
        optax.adam(1e-2),
        group=group(REPLICAS),
        has_aux=True,
        schedule=schedule,
        bucket_cap_mb=0,
        find_unused_parameters=True,
        **options,
    )
    state = step.init(PARAMS, rng=fddp.Shared(key) if shared else key)
    infos = []
    for _ in range(count):
        state, info = step(state, X)
        infos.append(info)
    return state, infos


def assert_same(schedule: Any, got: Any, want: Any) -> None:
    """Compares to the bit, except a staged step, which cuts its update at the arriving wires.

    With other wires it compiles other programs, in which XLA may fuse a product and a sum that it
    rounds one by one elsewhere.
    """
    tolerances: dict[str, Any] = (
        {"rtol": 1e-6, "atol": 3e-8} if schedule == "staged" else {"rtol": 0, "atol": 0}
    )
    close(got, want, **tolerances)


def on_the_wire(nbytes: float) -> int:
    return int(nbytes * 2 * (REPLICAS - 1) / REPLICAS)


@SCHEDULES
def test_layers_that_all_replicas_drop_are_not_sent_and_nothing_else_changes(group, schedule):
    state, infos = steps(group, True, schedule, skip_all_reduce_unused_params=True)
    plain, plain_infos = steps(group, True, schedule)
    assert_same(schedule, state.params, plain.params)
    layer_counts = [int(info.aux["kept"]) for info in infos]
    assert len(set(layer_counts)) > 1 and min(layer_counts) < LAYERS
    for info, plain_info, layers in zip(infos, plain_infos, layer_counts):
        assert int(info.sent.sum()) == on_the_wire(MASK + TAIL + layers * ONE)
        assert int(plain_info.sent.sum()) == on_the_wire(MASK + TAIL + LAYERS * ONE)
        # Whole layers: their sums are present or not; the flags for them travel alone.
        assert (
            sorted(info.sent.tolist()[:-1]) == [0] * (LAYERS - layers) + [on_the_wire(ONE)] * layers
        )
        assert (
            sorted(np.asarray(jax.tree.leaves(info.used)))
            == [0] * (LAYERS - layers) + [REPLICAS] * layers
        )


@SCHEDULES
def test_a_layer_that_one_replica_keeps_is_sent(group, schedule):
    options: Any = {"skip_all_reduce_unused_params": True}
    state, infos = steps(group, False, schedule, **options)
    plain, _ = steps(group, False, schedule)
    assert_same(schedule, state.params, plain.params)
    for info in infos:
        used = sum(int(n) > 0 for n in jax.tree.leaves(info.used))
        assert int(info.sent.sum()) == on_the_wire(MASK + TAIL + used * ONE)


def test_used_once_in_a_step_is_used(group):
    """One of the micro-batches uses it, or a call of no_sync."""
    several: dict[str, Any] = {"accumulation_steps": 2}
    for options in (several, {}):
        step = fddp.train_step(
            dropping,
            optax.sgd(0.1),
            group=group(REPLICAS),
            has_aux=True,
            bucket_cap_mb=0,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=True,
            **options,
        )
        state = step.init(PARAMS, rng=fddp.Shared(jax.random.key(7)))
        if not options:
            state, _ = step.no_sync(state, X)
        _, info = step(state, X)
        draw = lambda k: jax.random.bernoulli(  # noqa: E731
            jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0), k), 0.5, (LAYERS,)
        )
        union = np.asarray(draw(0)) | np.asarray(draw(1))
        assert np.asarray(jax.tree.leaves(info.used)).tolist() == (REPLICAS * union).tolist()
        assert int(info.sent.sum()) == on_the_wire(MASK + TAIL + union.sum() * ONE)


def test_a_shared_key_draws_alike_on_all_replicas_and_anew_in_each_step(group):
    def loss(w: Any, x: Any, *, rng: Any) -> Any:
        local_draw, shared_draw = (jax.random.uniform(rng[name]) for name in ("own", "shared"))
        return jnp.mean(w * x), {
            "own": local_draw,
            "own²": local_draw**2,
            "shared": shared_draw,
            "shared²": shared_draw**2,
        }

    keys = {"own": jax.random.key(1), "shared": fddp.Shared(jax.random.key(2))}
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(REPLICAS), has_aux=True)
    state = step.init(np.float32(1), rng=keys)
    draws = []
    for _ in range(2):
        state, info = step(state, np.ones(4, np.float32))
        variance = {name: float(info.aux[f"{name}²"] - info.aux[name] ** 2) for name in keys}
        assert variance["own"] > 1e-3 and abs(variance["shared"]) < 1e-6
        draws.append(float(info.aux["shared"]))
    assert draws[0] != draws[1]


def test_dropped_layers_and_hooks_go_together(group):
    both = {"skip_all_reduce_unused_params": True, "hook": hooks.bf16()}
    results = {
        schedule: steps(group, True, schedule, **both) for schedule in ("fused", "staged", "after")
    }
    for info in results["fused"][1]:
        layers = int(info.aux["kept"])
        assert int(info.sent.sum()) == on_the_wire(MASK + TAIL + layers * ONE / 2)
    for schedule, (state, _) in results.items():
        assert_same(schedule, state.params, results["fused"][0].params)


def test_it_needs_to_know_what_is_used():
    with pytest.raises(
        ValueError, match="skip_all_reduce_unused_params=True needs find_unused_parameters=True"
    ):
        fddp.train_step(dropping, optax.sgd(0.1), skip_all_reduce_unused_params=True)
