"""Leaves that an update needs whole: gathered for it, and held in parts."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(5)
SHAPES = [(5, 7), (7, 4), (4, 6), (6, 3), (3, 8)]
PARAMS = {f"w{k}": DRAW.normal(size=shape) for k, shape in enumerate(SHAPES)} | {"b": DRAW.normal(size=8)}
ROWS = DRAW.normal(size=(24, 5))


def loss_fn(p: Any, x: Any) -> Any:
    for k in range(len(SHAPES)):
        x = jnp.tanh(x @ p[f"w{k}"])
    return jnp.mean((x - p["b"]) ** 2)


def sent(group: fddp.Group, optimizer: optax.GradientTransformation) -> int:
    """The bytes that each replica tells it has sent in a step."""
    step = fddp.train_step(loss_fn, optimizer, group=group, shard="optimizer")
    _, info = step(step.init(jax.tree.map(np.float32, PARAMS)), ROWS.astype(np.float32))
    return int(np.asarray(info.sent).sum())


def parts(n: int) -> int:
    """How many numbers a replica holds of all matrices."""
    return sum(-(-m * k // n) for m, k in SHAPES)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_replica_is_given_each_matrix_whole(group: Groups, n: int):
    """The host sees which matrices come, from all devices together."""
    seen: Counter[tuple[int, ...]] = Counter()

    def orthogonal(x: np.ndarray) -> np.ndarray:
        seen[x.shape] += 1
        u, _, v = np.linalg.svd(x, full_matrices=False)
        return (u @ v).astype(x.dtype)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        made = [jax.pure_callback(orthogonal, x, x) if x.ndim == 2 else x for x in jax.tree.leaves(updates)]
        return jax.tree.unflatten(jax.tree.structure(updates), made), state

    direction = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = optax.chain(optax.trace(0.9), direction, optax.sgd(0.1))
    ends = []
    for shard in (None, "optimizer"):
        seen.clear()
        step = fddp.train_step(loss_fn, optimizer, group=group(n), shard=shard)
        state = step.init(jax.tree.map(np.float32, PARAMS))
        for _ in range(2):
            state, _ = jax.block_until_ready(step(state, ROWS.astype(np.float32)))
        ends.append(fddp.whole(state, group=group(n)))
        assert seen == dict.fromkeys(SHAPES, 2 * n)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *ends)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_matrices_that_are_gathered_are_told_among_the_bytes(group: Groups, n: int):
    """Each replica sends its part of each to all others; and the norms of three that are not transposed before."""
    more = sent(group(n), optax.contrib.muon(0.1)) - sent(group(n), optax.adam(0.1))
    assert more == 4 * (n - 1) * (parts(n) + 3)


def test_noise_that_all_replicas_make_alike_is_added_to_parts_and_nothing_is_gathered(group: Groups):
    assert sent(group(4), optax.noisy_sgd(0.1, key=0)) == sent(group(4), optax.sgd(0.1))


@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_the_momentum_of_a_leaf_that_is_gathered_is_held_in_equal_parts(group: Groups, shard: Any):
    n = 4
    step = fddp.train_step(loss_fn, optax.contrib.muon(0.1), group=group(n), shard=shard)
    state, _ = step(step.init(jax.tree.map(np.float32, PARAMS)), ROWS.astype(np.float32))
    mu = state.opt_state.inner_states["muon"].inner_state[0].mu
    held = Counter[Any]()
    for x in jax.tree.leaves(mu):
        held.update({part.device: part.data.size for part in x.addressable_shards})
    assert list(held.values()) == [parts(n)] * n


def test_a_checkpoint_of_muon_goes_on_on_other_numbers_of_replicas(group: Groups, tmp_path: Path, x64: None):
    def make(n: int, shard: Any) -> tuple[fddp.TrainStep, fddp.TrainState]:
        step = fddp.train_step(loss_fn, optax.contrib.muon(0.05), group=group(n), shard=shard)
        return step, step.init(PARAMS)

    step, state = make(4, "optimizer")
    state, _ = step(state, ROWS)
    saved = jax.tree.map(np.asarray, fddp.whole(state, group=group(4)))
    with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
        checkpoints.save(state)
    expected, _ = step(state, 2 * ROWS)
    expected = fddp.whole(expected, group=group(4))
    for n, shard in ((2, "optimizer"), (3, "state")):
        step, like = make(n, shard)
        with fddp.Checkpoints(tmp_path / "saved", step, every=1) as checkpoints:
            state, _ = checkpoints.restore(like)
        jax.tree.map(np.testing.assert_array_equal, fddp.whole(state, group=group(n)), saved)
        state, _ = step(state, 2 * ROWS)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13)  # noqa: E731
        jax.tree.map(close, fddp.whole(state, group=group(n)), expected)


def test_a_leaf_with_a_hidden_norm_is_gathered_and_a_norm_over_leaves_is_summed(group: Groups, x64: None):
    """Mutants of Adam: one divides each row by its norm, one all by the norm of two leaves, and neither tells."""

    def rows(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: g / (1 + jnp.linalg.norm(g, axis=-1, keepdims=True)), updates), state

    def some(updates: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(updates[name] ** 2) for name in ("w0", "b")))
        return jax.tree.map(lambda g: g / (1 + norm), updates), state

    # The sums of a vector's squares are one number, and so are those of two leaves together.
    for update, more in ((rows, parts(3) + 1), (some, 1)):
        mutant = optax.chain(optax.adam(0.1), optax.GradientTransformation(lambda params: optax.EmptyState(), update))
        ends = []
        for shard in (None, "optimizer"):
            step = fddp.train_step(loss_fn, mutant, group=group(3), shard=shard)
            state = step.init(PARAMS)
            for k in range(2):
                state, _ = step(state, ROWS * (k + 1))
            ends.append(fddp.whole(state, group=group(3)).params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *ends)
        assert sent(group(3), mutant) - sent(group(3), optax.adam(0.1)) == 4 * 2 * more
