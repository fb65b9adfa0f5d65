"""Batches other than rows: taken unchanged, or stacked, one for each replica and micro-batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import close

import fddp

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
NODES = 9
EDGES = 14
GRAPHS = 3
W = np.linspace(-1, 1, 3)


class Graph(NamedTuple):
    """A graph as in jraph: arrays of nodes, edges and graphs, and a number."""

    nodes: Any
    edges: dict[str, Any]
    labels: Any
    scale: Any


@jax.tree_util.register_dataclass
@dataclass
class Packed:
    inner: Graph
    more: list[Any]


def graph(seed: int, labelled: int = GRAPHS) -> Graph:
    numbers = np.random.default_rng(seed)
    labels = np.where(np.arange(GRAPHS) < labelled, numbers.normal(size=GRAPHS), np.nan)
    edge_nodes = {name: numbers.integers(0, NODES, EDGES) for name in ("senders", "receivers")}
    return Graph(numbers.normal(size=(NODES, 3)), edge_nodes, labels, np.float64(1 + seed))


def score(w: Any, g: Graph) -> Any:
    messages = jax.ops.segment_sum(g.nodes[g.edges["senders"]], g.edges["receivers"], NODES)
    return jnp.sum(jnp.tanh((g.nodes + messages) @ w).reshape(GRAPHS, -1), axis=1) * g.scale


def loss_fn(w: Any, g: Graph) -> Any:
    return jnp.mean((score(w, g) - g.labels) ** 2)


def weighted(w: Any, g: Graph) -> Any:
    has_label = ~jnp.isnan(g.labels)
    losses = jnp.where(has_label, score(w, g) - jnp.where(has_label, g.labels, 0), 0) ** 2
    return fddp.Weighted(jnp.sum(losses) / jnp.maximum(has_label.sum(), 1), has_label.sum())


def mean(graphs: list[Graph]) -> tuple[Any, Any]:
    """Loss and gradient by hand, with weight 1 for each graph."""
    results = [jax.value_and_grad(loss_fn)(jnp.asarray(W), g) for g in graphs]
    return np.mean([loss for loss, _ in results]), np.mean([grad for _, grad in results], axis=0)


@pytest.mark.parametrize(
    "wrap", [lambda g: g, lambda g: fddp.Stacked([g])], ids=["as it is", "stacked"]
)
@pytest.mark.parametrize("schedule", ["overlap", "after"])
def test_one_replica_takes_any_tree_as_it_is(group: Groups, x64: None, wrap: Any, schedule: str):
    f = fddp.value_and_grad(loss_fn, group=group(1), schedule=schedule)  # type: ignore
    for seed in range(2):
        loss, grad = f(W, wrap(graph(seed)))
        close((loss, *grad), (mean([graph(seed)])[0], *mean([graph(seed)])[1]))


@pytest.mark.parametrize(
    "wrap, unwrap",
    [
        (lambda g: Packed(g, [g.scale]), lambda b: b.inner),
        (lambda g: {"deep": (g, {"constant": 2})}, lambda b: b["deep"][0]),
        (lambda g: (g, None, 3.0), lambda b: b[0]),
    ],
    ids=["dataclass", "dict", "tuple"],
)
def test_a_batch_may_be_any_tree_of_arrays_and_numbers(
    group: Groups, x64: None, wrap: Any, unwrap: Any
):
    f = fddp.value_and_grad(lambda w, b: loss_fn(w, unwrap(b)), group=group(2))
    loss, grad = f(W, fddp.Stacked([wrap(graph(0)), wrap(graph(1))]))
    close((loss, *grad), (mean([graph(0), graph(1)])[0], *mean([graph(0), graph(1)])[1]))


def test_a_weight_counts_the_labels_that_are_known(group: Groups, x64: None):
    graphs = [graph(0, labelled=1), graph(1, labelled=3)]
    loss, grad = fddp.value_and_grad(weighted, group=group(2))(W, fddp.Stacked(graphs))

    def total(w: Any) -> Any:
        weighted_losses = [weighted(w, g) for g in graphs]
        return sum(x.value * x.weight for x in weighted_losses) / 4

    expected = jax.value_and_grad(total)(jnp.asarray(W))
    close((loss, *grad), (expected[0], *expected[1]))


def test_a_rank_that_joins_goes_on_with_its_last_graph(group: Groups, x64: None):
    step = fddp.train_step(loss_fn, optax.sgd(1.0), group=group(1))
    state = step.init(W)
    for batch in fddp.join([graph(0)], group(1)):
        state, _ = step(state, batch)
    close(state.params, W - mean([graph(0)])[1])
    step = fddp.train_step(loss_fn, optax.sgd(1.0), group=group(2))
    state = step.init(W)
    for batch in fddp.join([fddp.Stacked([graph(0), graph(1)])], group(2)):
        state, _ = step(state, batch)
    close(state.params, W - mean([graph(0), graph(1)])[1])


def test_join_counts_no_rows_of_graphs_with_as_many_nodes_as_edges(group: Groups):
    peer = SimpleNamespace(
        ranks=(0, 1), all_gather=lambda value: np.stack([value, np.ones_like(value)])
    )  # never runs out
    two = replace(group(1), hosts=peer)
    graphs = [{"nodes": np.ones(4), "edges": np.ones(edges)} for edges in (5, 4, 5)]
    yielded = list(islice(fddp.join(graphs, two), 4))
    assert [float(np.mean(batch.share)) for batch in yielded] == [1, 1, 1, 0]
    assert [float(np.mean(batch.divisor)) for batch in yielded] == [1, 1, 1, 1]


def test_an_evaluation_counts_each_of_them_once(group: Groups, x64: None):
    graphs = [graph(seed) for seed in range(3)]
    for batches in (graphs, [fddp.Stacked(graphs)], [fddp.Stacked(graphs[:2]), graphs[2]]):
        close(fddp.evaluate(loss_fn, W, batches, group=group(2)), mean(graphs)[0])
    graphs_of_both = [graph(0, labelled=1), graph(1, labelled=3)]
    want = sum(float(weighted(W, g).value) * w for g, w in zip(graphs_of_both, (1, 3))) / 4
    close(fddp.evaluate(weighted, W, graphs_of_both, group=group(2)), want)


def test_an_evaluation_does_not_count_the_rows_of_a_stacked_batch(group: Groups):
    batches = [
        {"x": np.full(4, 3.0, np.float32), "y": np.zeros(4)},
        {"x": np.zeros(5, np.float32), "y": np.zeros(5)},
    ]
    value = fddp.evaluate(
        lambda w, b: jnp.mean(w * b["x"]), 1.0, [fddp.Stacked([b]) for b in batches], group=group(2)
    )
    assert value == (3 + 0) / 2


def test_a_constant_beside_the_rows_needs_a_batch_for_each_replica(group: Groups):
    loss = lambda w, b: jnp.mean((b["x"] @ w * b["temperature"]) ** 2)  # noqa: E731
    batch = {"x": np.ones((4, 3), np.float32), "temperature": np.float32(2)}
    w = np.ones(3, np.float32)
    assert float(fddp.value_and_grad(loss, group=group(1))(w, batch)[0]) == 36.0
    words = (
        r"equally many rows, got temperature float32\[\], x float32\[4, 3\]: this process has 2 "
        r"replicas × 1 micro"
    )
    with pytest.raises(
        ValueError, match=words + r".*fddp\.Stacked of 2 batches of one form, one for each"
    ):
        fddp.value_and_grad(loss, group=group(2))(w, batch)
    halves = [batch | {"x": batch["x"][:2]}, batch | {"x": batch["x"][2:]}]
    assert float(fddp.value_and_grad(loss, group=group(2))(w, fddp.Stacked(halves))[0]) == 36.0


def test_stacked_batches_that_do_not_fit_are_named(group: Groups):
    f = fddp.value_and_grad(loss_fn, group=group(2))
    with pytest.raises(
        ValueError, match="holds batches of equal forms, and it holds 3: this process has 2"
    ):
        f(W, fddp.Stacked([graph(0)] * 3))
    unequal = graph(1)._replace(labels=np.zeros(5))
    with pytest.raises(
        ValueError, match=r"labels is float32\[3\] in batch 0 and float32\[5\] in batch 1"
    ):
        f(W, fddp.Stacked([graph(0), unequal]))
    with pytest.raises(ValueError, match="batch 1 has the structure"):
        f(W, fddp.Stacked([graph(0), {"nodes": 1}]))


def test_stacked_batches_that_are_not_numeric_are_refused_as_plain_ones(group: Groups):
    f = fddp.value_and_grad(lambda w, b: w * 1.0, group=group(2))
    for x in ("cat", np.array("cat"), object()):
        with pytest.raises(TypeError, match="holds leaves that are not numeric, text"):
            f(1.0, fddp.Stacked([{"text": x}] * 2))
    for batches in (None, 5):
        with pytest.raises(TypeError, match="Stacked: batches must be a sequence of batches, got"):
            f(1.0, fddp.Stacked(batches))  # pyright: ignore[reportArgumentType]


def test_the_first_batch_decides_whether_rows_are_counted(group: Groups):
    loss = lambda w, b: jnp.mean(w * b["x"])  # noqa: E731
    step = fddp.train_step(loss, optax.sgd(0.1), group=group(1))
    rows = {"x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}
    state, _ = step(step.init(np.float32(1)), rows)
    with pytest.raises(
        ValueError,
        match=r"as the first batch had: give rows each time, or fddp\.Stacked\(\[batch\]\)",
    ):
        step(state, rows | {"y": np.ones(3, np.float32)})
    # Of graphs that by chance have as many nodes as edges nothing is counted.
    step = fddp.train_step(loss, optax.sgd(1.0), group=group(1))
    state, _ = step.no_sync(step.init(np.float32(1)), rows | {"y": np.ones(3, np.float32)})
    state, _ = step(state, {"x": 3 * np.ones(8, np.float32), "y": np.ones(8, np.float32)})
    np.testing.assert_allclose(state.params, 1 - (1 + 3) / 2)
