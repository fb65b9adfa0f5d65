"""Leaves that an update needs whole: each has an owner, one replica; others are in parts."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.buckets import ShardLayout
from fddp.comm.communicator import axis_communicator
from fddp.jax_internals import parse
from fddp.jaxpr import LeafWork
from fddp.sharding.owners import at_owners, dealt

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(5)
SHAPES = [(5, 7), (7, 4), (4, 6), (6, 3), (3, 8)]
# Muon's operations: five rounds of three products each, of m × m by n, of m × m by m, and of m × m
# by n.
PRODUCTS = [5 * (4 * m**2 * k + 2 * m**3) for m, k in map(sorted, SHAPES)]
PARAMS = {f"w{k}": DRAW.normal(size=shape) for k, shape in enumerate(SHAPES)} | {
    "b": DRAW.normal(size=8)
}
ROWS = DRAW.normal(size=(24, 5))


def loss_fn(p: Any, x: Any) -> Any:
    for k in range(len(SHAPES)):
        x = jnp.tanh(x @ p[f"w{k}"])
    return jnp.mean((x - p["b"]) ** 2)


def bound(costs: Sequence[int], n: int) -> float:
    """Graham's bound for the fullest of n owners: a third more than in the best distribution."""
    ways = product(range(n), repeat=len(costs))
    fullest = (
        max(sum(c for c, k in zip(costs, way) if k == owner) for owner in range(n)) for way in ways
    )
    return (4 - 1 / n) / 3 * min(fullest)


@pytest.mark.parametrize("n", [2, 3])
def test_the_fullest_owner_has_at_most_a_third_more_than_it_must(n: int):
    for seed in range(10):
        costs = np.random.default_rng(seed).integers(1, 50, size=7).tolist()
        owners = dealt(dict(enumerate(costs)), n)
        assert set(owners) == set(range(7))
        assert max(
            sum(costs[leaf] for leaf in owners if owners[leaf] == k) for k in range(n)
        ) <= bound(costs, n)


def test_results_of_an_owner_return_in_parts_whatever_their_dtype_and_size():
    """More owners than leaves, sizes that ranks do not divide, and an array without elements."""
    n = 4
    comm = axis_communicator("ranks", 4, "cpu")
    inputs = {
        7: [np.arange(10, dtype=np.float32).reshape(2, 5), np.arange(3, dtype=np.int32)],
        2: [
            np.array([[True, False, True]]),
            np.zeros((0, 2), np.float32),
            np.linspace(0, 1, 9, dtype=np.float32),
        ],
    }
    makes = {
        7: lambda xs: [xs[0].T @ xs[0], xs[1].sum()],
        2: lambda xs: [~xs[0], xs[1].T, jnp.sort(-xs[2])[:6]],
    }

    def in_parts(x: np.ndarray) -> np.ndarray:
        return np.pad(x.ravel(), (0, -x.size % n)).reshape(n, -1)

    def run(inputs_of_rank: dict[int, list[Any]]) -> Any:
        jaxprs = {leaf: jax.make_jaxpr(makes[leaf])(xs).jaxpr for leaf, xs in inputs.items()}
        works = [LeafWork(leaf, x.eqns, x.invars, x.outvars) for leaf, x in jaxprs.items()]
        layouts = [ShardLayout((), n)] * 8
        parts = [inputs_of_rank[leaf] for leaf in jaxprs]
        return at_owners(comm, layouts, works, parts, lambda work, xs: makes[work.leaf](xs))

    outputs = jax.vmap(run, axis_name="ranks")(jax.tree.map(in_parts, inputs))
    for (leaf, xs), got in zip(inputs.items(), outputs):
        for want, x in zip(makes[leaf]([jnp.asarray(x) for x in xs]), got):
            assert x.dtype == want.dtype
            np.testing.assert_array_equal(x.reshape(n, -1), in_parts(np.asarray(want)))


@pytest.mark.quick("3")
@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_matrix_is_orthogonalised_once_over_all_replicas(group: Groups, n: int):
    """The host sees the matrices of all devices."""
    shapes: Counter[tuple[int, ...]] = Counter()

    def orthogonal(x: np.ndarray) -> np.ndarray:
        shapes[x.shape] += 1
        u, _, v = np.linalg.svd(x, full_matrices=False)
        return (u @ v).astype(x.dtype)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        directions = [
            jax.pure_callback(orthogonal, x, x) if x.ndim == 2 else x
            for x in jax.tree.leaves(updates)
        ]
        return jax.tree.unflatten(jax.tree.structure(updates), directions), state

    direction = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = optax.chain(optax.trace(0.9), direction, optax.sgd(0.1))
    results = []
    for shard in (None, "optimizer"):
        shapes.clear()
        step = fddp.train_step(loss_fn, optimizer, group=group(n), shard=shard)
        state = step.init(jax.tree.map(np.float32, PARAMS))
        for _ in range(2):
            state, _ = jax.block_until_ready(step(state, ROWS.astype(np.float32)))
        results.append(fddp.whole(state, group=group(n)))
        assert shapes == dict.fromkeys(SHAPES, 2 if shard else 2 * n)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *results)


def operations(module: Any, computation: Any) -> int:
    """Operations of the matrix products of a computation, two for each pair."""
    total = 0
    for line in computation.values():
        total += sum(operations(module, module.computations[name]) for name in line.calls)
        if line.opcode == "dot":
            (contracted,) = re.findall(r"lhs_contracting_dims=\{(\d+)\}", line.attributes)
            lhs = computation[line.operands[0]].result[0].dims
            total += 2 * prod(line.result[0].dims) * lhs[int(contracted)]
    return total


@pytest.mark.quick("4")
@pytest.mark.parametrize("n", [2, 4])
def test_the_branches_of_a_program_share_out_the_products_of_muon(group: Groups, n: int):
    step = fddp.train_step(loss_fn, optax.contrib.muon(0.1), group=group(n), shard="optimizer")
    lowered = step.lower(step.init(jax.tree.map(np.float32, PARAMS)), ROWS.astype(np.float32))
    module = parse(lowered.compile().as_text() or "")
    lengths: list[list[int]] = []
    for computation in module.computations.values():
        for instruction in computation.values():
            if instruction.opcode == "conditional" and len(instruction.calls) == n:
                branches = [module.computations[name] for name in instruction.calls]
                lengths.append([operations(module, branch) for branch in branches])
    (branches,) = lengths
    assert sum(branches) == sum(PRODUCTS) and max(branches) <= bound(PRODUCTS, n)


def test_the_exchanges_with_the_owners_count_among_the_bytes(group: Groups):
    n = 4
    nbytes = []
    for optimizer in (optax.adam(0.1), optax.contrib.muon(0.1)):
        step = fddp.train_step(loss_fn, optimizer, group=group(n), shard="optimizer")
        _, info = step(step.init(jax.tree.map(np.float32, PARAMS)), ROWS.astype(np.float32))
        nbytes.append(int(np.asarray(info.sent).sum()))
    owners = dealt({k: m * k_ for k, (m, k_) in enumerate(SHAPES)}, n)
    sizes = [-(-m * k // n) for m, k in SHAPES]
    fullest = max(
        sum(size for leaf, size in enumerate(sizes) if owners[leaf] == owner) for owner in range(n)
    )
    # There and back, to each of the others; and the norms of three matrices that are not transposed
    # before.
    assert nbytes[1] - nbytes[0] == 4 * (n - 1) * (2 * fullest + 3)


@pytest.mark.parametrize("shard", ["optimizer", "state"])
def test_the_momentum_of_a_leaf_with_an_owner_is_held_in_equal_parts(group: Groups, shard: Any):
    n = 4
    step = fddp.train_step(loss_fn, optax.contrib.muon(0.1), group=group(n), shard=shard)
    state, _ = step(step.init(jax.tree.map(np.float32, PARAMS)), ROWS.astype(np.float32))
    mu = state.opt_state.inner_states["muon"].inner_state[0].mu
    elements = Counter[Any]()
    for x in jax.tree.leaves(mu):
        elements.update({part.device: part.data.size for part in x.addressable_shards})
    assert list(elements.values()) == [sum(-(-m * k // n) for m, k in SHAPES)] * n


def test_a_checkpoint_of_muon_goes_on_on_other_numbers_of_replicas(
    group: Groups, tmp_path: Path, x64: None
):
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


def test_a_norm_hidden_in_a_leaf_needs_an_owner_and_one_over_some_leaves_is_summed(
    group: Groups, x64: None
):
    """Mutants of Adam: one divides each row by its norm, one all by the norm of two leaves, and
    neither declares it."""

    def rows(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(
            lambda g: g / (1 + jnp.linalg.norm(g, axis=-1, keepdims=True)), updates
        ), state

    def norm_of_some(updates: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(updates[name] ** 2) for name in ("w0", "b")))
        return jax.tree.map(lambda g: g / (1 + norm), updates), state

    for update, has_owner in ((rows, True), (norm_of_some, False)):
        mutant = optax.chain(
            optax.adam(0.1), optax.GradientTransformation(lambda params: optax.EmptyState(), update)
        )
        results = []
        for shard in (None, "optimizer"):
            step = fddp.train_step(loss_fn, mutant, group=group(3), shard=shard)
            state = step.init(PARAMS)
            for k in range(2):
                state, _ = step(state, ROWS * (k + 1))
            results.append(fddp.whole(state, group=group(3)).params)
            text = step.lower(state, ROWS).as_text()
            assert ("stablehlo.case" in text) == (has_owner and shard is not None)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *results)
