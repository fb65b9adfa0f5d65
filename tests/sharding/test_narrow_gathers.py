"""Parameters in shards travel in the bits of the loss, which is the same bit for bit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import crossed
from trees import close, same_bits

import fddp
from fddp.jaxpr import read_in

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
WIDTH = 8
DRAW = np.random.default_rng(2)
PARAMS = {name: DRAW.normal(size=(WIDTH, WIDTH)).astype(np.float32) for name in "ab"}
ROWS = DRAW.normal(size=(3, 6, WIDTH)).astype(np.float32)
GATHERED = 2 * WIDTH * WIDTH  # numbers


def loss_fn(p: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"] - 1) ** 2)


def half_in_16_bits(p: Any, x: Any) -> Any:
    """Half of the parameters compute in 16 bits, the other half in 32."""
    return jnp.mean(
        (jnp.tanh(x.astype(jnp.bfloat16) @ p["a"].astype(jnp.bfloat16)) @ p["b"] - 1) ** 2
    )


def trained(
    group: fddp.Group,
    loss: Any,
    *,
    params: Any = PARAMS,
    rows: Any = ROWS,
    optimizer: Any = None,
    bucket_cap_mb: float = 0.0,
    **options: Any,
) -> tuple[list[float], Any, int]:
    optimizer = optimizer or optax.adam(0.05)
    step = fddp.train_step(loss, optimizer, group=group, bucket_cap_mb=bucket_cap_mb, **options)
    state = step.init(params)
    losses = list[float]()
    nbytes = 0
    for batch in rows:
        state, info = step(state, batch)
        losses.append(float(info.loss))
        nbytes = int(np.sum(info.sent))
    return losses, fddp.whole(state.params), nbytes


@pytest.mark.quick("fused")
@pytest.mark.parametrize(
    "schedule", ["fused", pytest.param("staged", marks=pytest.mark.slow), "eager"]
)
def test_gathers_take_half_the_bytes_and_the_loss_has_the_same_bits(group: Groups, schedule: Any):
    loss = fddp.mixed_precision(loss_fn, jnp.bfloat16)
    step = {"shard": "state", "schedule": schedule}
    losses, params, nbytes = trained(group(2), loss, **step)
    # A second use of the parameters, in 32 bits and of no weight, keeps the gathers whole.
    wide_gathers = lambda p, x: loss(p, x) + 0 * (jnp.sum(p["a"]) + jnp.sum(p["b"]))  # noqa: E731
    expected, masters, before = trained(group(2), wide_gathers, **step)
    assert losses == expected
    same_bits(params, masters)
    assert params["a"].dtype == np.float32
    # Each of two replicas sends its half of the gathered leaves.
    assert before - nbytes == GATHERED // 2 * (4 - 2)


LAYERS = 4
STACK = {"layers": DRAW.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5}
WAYS: dict[str, dict[str, Any]] = {"state": {"shard": "state"}}


def scanned(p: Any, x: Any) -> Any:
    return jnp.mean(
        (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0] - 1) ** 2
    )


@pytest.mark.quick("fused-state")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("schedule", ["fused", pytest.param("staged", marks=pytest.mark.slow)])
def test_in_nodes_gathers_take_half_the_bytes_and_the_loss_is_the_same(
    group: Groups, schedule: Any, way: Any
):
    """The other replicas hold all parameters, and their programs compute in the same 16 bits."""
    nodes = group(6).hierarchical(2)
    loss = fddp.mixed_precision(loss_fn, jnp.bfloat16)
    losses, params, nbytes = trained(nodes, loss, schedule=schedule, **way)
    expected, masters, _ = trained(nodes, loss, schedule=schedule)
    _, _, wide_bytes = trained(nodes, loss_fn, schedule=schedule, **way)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    close(params, masters, rtol=1e-5, atol=1e-6)
    # Each of a node's two replicas sends its half of the gathered leaves, once or for one bucket
    # of two twice.
    assert wide_bytes - nbytes in (GATHERED // 2 * (4 - 2), 3 * GATHERED // 4 * (4 - 2))


@pytest.mark.quick("fused-at once")
@crossed(schedule=["fused", "staged"], nodes={"at once": None, "in nodes": 2})
def test_slices_of_a_loop_are_gathered_in_half_the_bytes(group: Groups, schedule: Any, nodes: Any):
    replicas = group(6).hierarchical(nodes) if nodes else group(2)
    loss = fddp.mixed_precision(scanned, jnp.bfloat16)
    options: dict[str, Any] = {
        "schedule": schedule,
        "params": STACK,
        "bucket_cap_mb": 2 * WIDTH * WIDTH * 4 / 2**20,
    }
    losses, params, nbytes = trained(replicas, loss, **options, shard="state")
    expected, masters, _ = trained(replicas, loss, **options)
    _, _, wide_bytes = trained(replicas, scanned, **options, shard="state")
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    close(params, masters, rtol=1e-5, atol=1e-6)
    # Each layer is gathered once, and those that the backward pass drops again.
    layer = WIDTH * WIDTH // 2 * (4 - 2)
    assert LAYERS * layer <= wide_bytes - nbytes <= 2 * LAYERS * layer


@pytest.mark.quick("layers-fused-state")
@crossed(params={"layers": PARAMS, "a stack": STACK}, schedule=["fused", "staged"], way=WAYS)
def test_in_nodes_scatters_take_fewer_bits_and_lose_nothing_of_small_integers(
    group: Groups, params: Any, schedule: Any, way: Any
):
    """All sums of the gradients are integers that 16 bits hold."""
    linear = lambda p, x: sum(jnp.sum(leaf * x[0, :1]) for leaf in jax.tree.leaves(p))  # noqa: E731
    rows = np.arange(6 * WIDTH, dtype=np.float32).reshape(6, WIDTH)[None] % 7
    nodes = group(6).hierarchical(2)
    options = {
        "params": params,
        "rows": rows,
        "schedule": schedule,
        "optimizer": optax.sgd(1.0),
        **way,
    }
    _, got, nbytes = trained(nodes, linear, hook=fddp.hooks.bf16(), **options)
    _, _, plain = trained(nodes, linear, **options)
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old - np.mean(rows[0, :, 0]), rtol=1e-6),
        got,
        params,
    )
    assert nbytes < plain


def test_a_parameter_that_is_read_whole_travels_whole(group: Groups):
    _, _, half = trained(group(2), half_in_16_bits, shard="state")
    _, _, wide_bytes = trained(group(2), loss_fn, shard="state")
    assert wide_bytes - half == GATHERED // 4 * (4 - 2)


def test_a_later_batch_that_reads_more_is_refused(group: Groups):
    narrow = fddp.mixed_precision(loss_fn, jnp.bfloat16)
    step = fddp.train_step(
        lambda p, x: narrow(p, x) if len(x) == 3 else loss_fn(p, x),
        optax.sgd(0.1),
        group=group(2),
        shard="state",
    )
    state, _ = step(step.init(PARAMS), ROWS[0])
    with pytest.raises(
        ValueError, match="a is read as float32, and the first batch's loss read it as bfloat16"
    ):
        step(state, ROWS[0][:4])


@pytest.mark.parametrize(
    ("f", "dtypes"),
    [
        (lambda x: jnp.sum(x.astype(jnp.bfloat16)), [jnp.bfloat16]),
        (lambda x: jnp.sum(x.astype(jnp.bfloat16)) + x[0], [None]),
        (lambda x: jnp.sum(x.astype(jnp.bfloat16)) + jnp.sum(x.astype(jnp.float16)), [None]),
        (lambda x: jnp.sum(x.astype(jnp.int8)), [None]),
        (lambda x: 1.0, [None]),
        (lambda x: jax.jit(lambda x: x.astype(jnp.float16))(x), [jnp.float16]),
        (lambda x: jax.checkpoint(lambda x: jnp.sin(x.astype(jnp.float16)))(x), [jnp.float16]),
        (
            lambda x: jax.lax.scan(
                lambda c, row: (c + row.astype(jnp.bfloat16), None), jnp.bfloat16(0), x
            )[0],
            [jnp.bfloat16],
        ),
        (lambda x: jax.lax.scan(lambda c, row: (c + row, None), jnp.float32(0), x)[0], [None]),
    ],
)
def test_a_program_tells_in_which_bits_it_reads_its_inputs(f: Any, dtypes: Any):
    assert read_in(jax.make_jaxpr(f)(jnp.ones(4))) == [
        None if dtype is None else np.dtype(dtype) for dtype in dtypes
    ]
