"""States in shards work with parameters, losses and groups of all kinds: they train as whole
states."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
WIDTH = 6
DRAW = np.random.default_rng(0)
ROWS = DRAW.normal(size=(24, WIDTH)).astype(np.float32)
WEIGHTS = {f"w{k}": (DRAW.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32) for k in range(3)}
WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard": "optimizer"},
    "state": {"shard": "state"},
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def deep(p: Any, x: Any) -> jax.Array:
    for k in range(3):
        x = jnp.tanh(jnp.real(x @ p[f"w{k}"]))
    return jnp.mean((x - 1).astype(jnp.float32) ** 2)


PARAMS: dict[str, Any] = {
    "of 16 bits": {name: jnp.asarray(w, jnp.bfloat16) for name, w in WEIGHTS.items()},
    "complex": {name: w + 1j * w.T for name, w in WEIGHTS.items()},
    "of two dtypes": WEIGHTS | {"w1": jnp.asarray(WEIGHTS["w1"], jnp.float16)},
}


def trained(
    group: fddp.Group,
    loss: Any,
    params: Any,
    *,
    optimizer: Any = None,
    model_state: Any = None,
    **options: Any,
) -> Any:
    step = fddp.train_step(
        loss, optimizer or optax.adam(0.05), group=group, bucket_cap_mb=0, **options
    )
    state = step.init(params, model_state=model_state)
    for k in range(3):
        state, _ = step(state, ROWS + k / 10)
    state = fddp.whole(state)
    return state.params, state.opt_state, state.model_state


def alike(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        wide = np.complex64 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float32
        # A sum over three replicas may be rounded once more where it is scattered.
        rounding = 8 * float(jnp.finfo(a.dtype).eps) if jnp.issubdtype(a.dtype, jnp.inexact) else 0
        np.testing.assert_allclose(
            np.asarray(a, wide), np.asarray(b, wide), rtol=rounding, atol=rounding
        )


@pytest.mark.quick("complex-optimizer", "of 16 bits-state", "of two dtypes-state")
@each_way
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_parameters_of_other_dtypes(group: Groups, params: Any, way: dict[str, Any]):
    alike(trained(group(3), deep, params, **way), trained(group(3), deep, params))


@pytest.mark.quick("state")
@each_way
def test_a_loss_in_16_bits_with_whole_masters(group: Groups, way: dict[str, Any]):
    loss = fddp.mixed_precision(deep, jnp.bfloat16)
    params, opt_state, _ = trained(group(3), loss, WEIGHTS, **way)
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}
    expected = trained(group(3), loss, WEIGHTS)
    alike((params, opt_state), expected[:2])


@pytest.mark.quick("state")
@each_way
def test_several_optimizers_and_masks(group: Groups, way: dict[str, Any]):
    rules: Any = {
        "adam": optax.adamw(0.05, mask={"w0": True, "w1": False, "w2": False}),
        "sgd": optax.sgd(0.1, momentum=0.9),
    }
    optimizer = optax.multi_transform(rules, {"w0": "adam", "w1": "sgd", "w2": "adam"})
    alike(
        *(trained(group(3), deep, WEIGHTS, optimizer=optimizer, **options) for options in (way, {}))
    )


@pytest.mark.quick("state")
@each_way
def test_hosts_that_sum_among_their_own_replicas_first(group: Groups, way: dict[str, Any]):
    flat = group(4)
    alike(trained(flat.hierarchical(local=2), deep, WEIGHTS, **way), trained(flat, deep, WEIGHTS))


@pytest.mark.quick("state")
@each_way
def test_statistics_of_all_rows(group: Groups, way: dict[str, Any]):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Dense(WIDTH)(x)
            x = fddp.BatchNorm(use_running_average=False, axis_name="replica")(x)
            return nn.Dense(1)(jnp.tanh(x))

    net = fddp.from_linen(Net(), lambda model, x: jnp.mean((model(x)[:, 0] - x[:, 0]) ** 2))
    params, buffers = net.init(jax.random.key(0), ROWS)
    buffer_options: Any = {"model_state": buffers, "broadcast_buffers": "mean"}
    alike(
        *(
            trained(group(2), net.loss_fn, params, **buffer_options, **options)
            for options in (way, {})
        )
    )


@pytest.mark.quick("optimizer")
@each_way
def test_a_last_batch_with_fewer_rows(group: Groups, way: dict[str, Any]):
    def joined(**options: Any) -> Any:
        step = fddp.train_step(deep, optax.adam(0.05), group=group(2), bucket_cap_mb=0, **options)
        state = step.init(WEIGHTS)
        for batch in fddp.join([ROWS, ROWS[:10]], group(2)):
            state, _ = step(state, batch)
        state = fddp.whole(state)
        return state.params, state.opt_state

    alike(joined(**way), joined())
