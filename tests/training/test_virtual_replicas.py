"""Virtual replicas: training gives the same bits on any number of real ones."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice, pairwise
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array
from problems import square
from trees import bits, close

import fddp
from fddp.comm import block_of, tree_sum

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
Steps = Callable[[int], fddp.TrainStep]
Bits = list[list[bytes]]
DRAW = np.random.default_rng(23)
ROWS = DRAW.normal(size=(64, 5)).astype(np.float32)
LABELS = DRAW.integers(3, size=64)
VIRTUAL = 12


class Net(nn.Module):
    """The causes of different bits in replicas: sums over rows, buffers, random numbers,
    weights."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(7)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=False)(jnp.tanh(x)))


def loss_fn(params: Any, batch: Any, model_state: Any, rng: Any) -> Any:
    rows, labels = batch
    logits, new = Net().apply(
        {"params": params, **model_state}, rows, mutable=["batch_stats"], rngs={"dropout": rng}
    )
    weights = 1.0 + labels  # as of rows with more and less tokens
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    value = fddp.Weighted(jnp.sum(weights * losses) / jnp.sum(weights), jnp.sum(weights))
    return value, (new, {"largest": jnp.max(logits)})


VARIABLES = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, ROWS[:2])
OPTIMIZER = fddp.dynamic_scale(
    optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01)), initial=2.0**10
)


def make(group: fddp.Group, **options: Any) -> fddp.TrainStep:
    chosen: Any = {
        "virtual_replicas": VIRTUAL,
        "broadcast_buffers": "mean",
        "bucket_cap_mb": 0,
    } | options
    return fddp.train_step(loss_fn, OPTIMIZER, group=group, has_aux=True, **chosen)


def first(step: fddp.TrainStep) -> fddp.TrainState:
    return step.init(
        VARIABLES["params"],
        model_state={"batch_stats": VARIABLES["batch_stats"]},
        rng=jax.random.key(7),
    )


def train(
    step: fddp.TrainStep, state: fddp.TrainState, steps: Sequence[int]
) -> tuple[fddp.TrainState, Bits]:
    """Trains with the rows of the steps of these numbers; also returns the bits of each step's
    report."""
    reports = []
    for rows in islice(
        fddp.samples(64, 24, virtual_replicas=VIRTUAL, start_step=steps[0]), len(steps)
    ):
        state, info = step(state, (ROWS[rows], LABELS[rows]))
        reports.append(bits((info.loss, info.aux, info.used, info.skipped)))
    return state, reports


def trained(step: fddp.TrainStep) -> Bits:
    state, reports = train(step, first(step), range(5))
    return [*reports, bits(state)]


### The same bits


@pytest.fixture(scope="module")
def step_of() -> Steps:
    """`step_of(n)`: the step on n replicas, compiled once for all tests."""
    return cache(
        lambda n: make(
            fddp.mesh_group(jax.make_mesh((n,), ("replica",), devices=jax.devices()[:n]))
        )
    )


@pytest.fixture(scope="module")
def single_replica_bits(step_of: Steps) -> Bits:
    """The bits of one replica with all rows."""
    return trained(step_of(1))


@pytest.mark.quick("3")
@pytest.mark.parametrize(
    "replicas", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))]
)
def test_the_bits_do_not_depend_on_the_number_of_replicas(
    step_of: Steps, single_replica_bits: Bits, replicas: int
):
    """The bits are those of parameters, optimizer, loss scale, BatchNorm and reports; with
    clipping, dropout and weights."""
    assert trained(step_of(replicas)) == single_replica_bits


def test_nor_on_how_it_is_sent(group: Groups, single_replica_bits: Bits):
    options: Any = {"bucket_cap_mb": 25.0, "order": "reverse"}
    assert trained(make(group(2), **options)) == single_replica_bits


@pytest.mark.slow
def test_nor_do_they_where_unused_parameters_are_found(group: Groups):
    """The program of the update is another one than without the option, and may round otherwise."""
    one, two = (trained(make(group(n), find_unused_parameters=True)) for n in (1, 2))
    # The number of replicas that used a leaf is reported as well.
    assert two[-1] == one[-1]


def test_nor_on_which_dtypes_travel_together(group: Groups, x64: None):
    """Σ w is added in one dtype, for any last bucket."""
    params = {
        "a": ROWS[:5].copy(),
        "b": np.ones(3),
        "c": jnp.ones(5, jnp.bfloat16),
        "d": np.zeros((0, 2), np.float32),
    }

    def loss(p: Any, x: Array) -> Any:
        value = jnp.mean(jnp.tanh(x @ p["a"] * p["c"]) ** 2) + jnp.mean(
            p["b"].astype(jnp.float32) ** 2
        )
        return fddp.Weighted(value, 1 + jnp.abs(x[0, 0])), (jnp.max(x), value.astype(jnp.bfloat16))

    def results(replicas: int, cap: float) -> list[bytes]:
        chosen: Any = {"bucket_cap_mb": cap, "accumulation_steps": 2}
        step = fddp.train_step(
            loss, optax.sgd(0.1), group=group(replicas), has_aux=True, virtual_replicas=6, **chosen
        )
        state = step.init(params)
        reports = []
        for k in range(3):
            state, info = step(state, ROWS[k : k + 24])
            reports.append((info.loss, info.aux))
        return bits((state, reports))

    assert results(1, 0) == results(2, 25) == results(3, 0)


def test_the_number_of_replicas_may_change_under_way(
    group: Groups, step_of: Steps, single_replica_bits: Bits
):
    steps = [
        step_of(3),
        step_of(1),
        make(group(2)),
    ]  # the last one is settled by a state that has been trained
    state, reports = train(steps[0], first(steps[0]), range(2))
    for step, numbers in zip(steps[1:], (range(2, 4), range(4, 5))):
        state, more = train(step, jax.device_get(state), numbers)
        reports += more
    assert [*reports, bits(state)] == single_replica_bits


def test_it_is_the_mean_over_slices_of_the_rows(group: Groups, x64: None):
    """Plain JAX, slice by slice, in float64."""

    def loss(params: Any, rows: Array, rng: Any) -> Array:
        mask = jax.random.bernoulli(rng, 0.7, rows.shape)
        return jnp.mean((jnp.tanh((rows * mask) @ params["w"]) + params["b"]) ** 2)

    params = {"b": np.ones(3), "w": DRAW.normal(size=(5, 3))}
    rows = ROWS[:24].astype(np.float64)
    key = jax.random.key(3)
    step = fddp.train_step(
        loss, optax.sgd(0.1), group=group(2), virtual_replicas=6, accumulation_steps=2
    )
    state, _ = step(step.init(params, rng=key), rows)

    total = jax.tree.map(np.zeros_like, params)
    for v, part in enumerate(np.split(rows, 6)):
        for k, half in enumerate(np.split(part, 2)):
            slice_key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 0), k), v)
            total = jax.tree.map(np.add, total, jax.grad(loss)(params, half, slice_key))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g / 12, params, total)
    close(dict(state.params), expected, rtol=1e-12, atol=0)


### The tree


def pair(a: str, b: str) -> str:
    return f"({a} {b})"


def test_a_sum_waits_for_no_later_number():
    """So few numbers exist at once, in a tree of any size."""
    for count in range(1, 20):
        present, most = set[int](), 0

        def number(k: int, present: set[int] = present) -> int:
            nonlocal most
            present.add(k)
            most = max(most, len(present))
            return k

        def add(a: int, b: int, present: set[int] = present) -> int:
            present.remove(b)
            return a

        assert tree_sum(range(count), add, number) == 0 and present == {0}
        assert most <= count.bit_length() + 1


def test_blocks_of_equal_size_are_subtrees():
    for virtual in range(1, 33):
        for each in (n for n in range(1, virtual + 1) if virtual % n == 0):
            block = block_of(virtual, each)
            blocks = [map(str, range(at, at + block)) for at in range(0, virtual, block)]
            total = tree_sum([str(k) for k in range(virtual)], pair)
            assert each % block == 0
            assert total == tree_sum([tree_sum(list(x), pair) for x in blocks], pair)


def test_another_order_is_another_sum(step_of: Steps, single_replica_bits: Bits):
    """The claims above are not blind: slices in another order give other bits."""
    step = step_of(1)
    state = first(step)
    for rows in islice(fddp.samples(64, 24, virtual_replicas=VIRTUAL), 5):
        rows = np.roll(rows.reshape(VIRTUAL, -1), 1, axis=0).reshape(-1)
        state, _ = step(state, (ROWS[rows], LABELS[rows]))
    assert b"".join(bits(state.params)) not in b"".join(single_replica_bits[-1])


@pytest.mark.quick("3-4")
@pytest.mark.parametrize("replicas, times", [(2, 1), (4, 1), (3, 4)])
def test_powers_of_two_send_the_bytes_of_an_all_reduce(group: Groups, replicas: int, times: int):
    """Other numbers send more: each block goes to a replica that adds a part of it, and the sum
    returns."""
    step = fddp.train_step(
        lambda w, x: jnp.mean((x @ w) ** 2),
        optax.sgd(0.1),
        group=group(replicas),
        virtual_replicas=12,
    )
    _, info = step(step.init(np.ones(10, np.float32)), np.ones((24, 10), np.float32))
    # Loss and weight travel alone; all is padded to a multiple of the replicas.
    part_sizes = sum(-(-size // replicas) for size in (10, 2))
    assert int(info.sent.sum()) == (replicas - 1) * (times + 1) * part_sizes * 4


def test_its_programs_run_one_by_one_and_then_its_messages_leave(group: Groups):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2), virtual_replicas=6)
    step(step.init(np.float32(0)), np.ones(12, np.float32))
    spans = step.timeline().spans
    replicas = ["replica 0", "replica 1", "sum", "replica 2", "sum"]
    messages = [message.name for message in step.plan.messages]
    assert [span.name for span in spans] == [
        "rows",
        *replicas,
        "pack",
        *messages,
        "unpack",
        "update",
    ]
    assert all(one.end <= other.start for one, other in pairwise(spans))


### Refused options


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a number that is none": ({"virtual_replicas": 0}, "must be a whole number of 1 or more"),
    "a schedule": ({"schedule": "after"}, "Leave schedule out"),
    "a hook": ({"hook": fddp.hooks.bf16()}, "does not work with hook"),
    "shards": ({"shard": "optimizer"}, "does not work with shard"),
    "buffers of its own": ({"broadcast_buffers": False}, "Give broadcast_buffers=True or 'mean'"),
    "replicas that do not divide it": (
        {"virtual_replicas": 8},
        "multiple of the number of replicas, 3, got 8.*Give 9",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_promise_it_refuses(group: Groups, case: str):
    options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        make(group(3), **options)


@pytest.mark.parametrize(
    "ask", [lambda x: jax.lax.pmean(x, "replica"), lambda x: x + jax.lax.axis_index("replica")]
)
def test_a_loss_with_collectives_of_its_own_is_refused(
    group: Groups, ask: Callable[[Array], Array]
):
    def loss(w: Array, x: Array) -> Array:
        return jnp.mean((x - ask(jnp.mean(x)) - w) ** 2)

    step = fddp.train_step(loss, optax.sgd(0.1), group=group(2), virtual_replicas=4)
    with pytest.raises(ValueError, match="depends on the number of replicas"):
        step(step.init(np.float32(0)), np.ones(8, np.float32))


def test_batches_are_of_one_size_and_nothing_is_left_pending(group: Groups):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2), virtual_replicas=4)
    state, _ = step(step.init(np.float32(0)), np.ones(16, np.float32))
    with pytest.raises(ValueError, match="has 2 rows and had 4 in the first batch"):
        step(state, np.ones(8, np.float32))
    with pytest.raises(ValueError, match="does not work with no_sync: sums stay pending"):
        step.no_sync(state, np.ones(16, np.float32))
    (batch,) = fddp.join([np.ones(16, np.float32)], group(2))
    with pytest.raises(ValueError, match="same number of batches on each rank"):
        step(state, batch)


### Rows


def test_each_virtual_replica_reads_the_same_rows_on_any_number_of_processes():
    for size in (1, 2, 3, 4, 6, 12):
        shares = [
            next(fddp.samples(50, 24, rank=rank, size=size, virtual_replicas=12))
            for rank in range(size)
        ]
        np.testing.assert_array_equal(
            np.concatenate(shares), next(fddp.samples(50, 24, virtual_replicas=12))
        )
    with pytest.raises(ValueError, match=r"multiple of size, 5, got 12.*give 15"):
        fddp.samples(50, 60, size=5, virtual_replicas=12)
    with pytest.raises(ValueError, match=r"multiple of virtual_replicas, 12, got 20.*give 24"):
        fddp.samples(50, 20, virtual_replicas=12)
