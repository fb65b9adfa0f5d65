"""Metrics and rows of ranks that have unequally many, against NumPy on the joined rows."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks

import fddp

### Rows of all ranks


def local_rows(group: fddp.Group, counts: list[int]) -> dict[str, np.ndarray]:
    """This rank's share of rows that are numbered through over all ranks."""
    first = sum(counts[: group.rank])
    number = np.arange(first, first + counts[group.rank])
    return {"number": number, "pair": np.stack([number, -number], axis=1).astype(jnp.bfloat16)}


@claim()
def the_rows_of_all_ranks_come_in_order_of_rank_however_many_each_has(group: fddp.Group):
    # More on later ranks and none on the first, the other way round, and none anywhere.
    for counts in (
        [3 * rank for rank in range(group.size)],
        list(range(group.size, 0, -1)),
        [0] * group.size,
    ):
        got = fddp.gather_rows(local_rows(group, counts), group=group)
        number = np.arange(sum(counts))
        assert got["number"].tolist() == number.tolist()
        assert got["pair"].dtype == jnp.bfloat16 and got["pair"].shape == (len(number), 2)
        assert got["pair"].astype(int).tolist() == [[n, -n] for n in number]


@claim()
def an_array_without_rows_has_the_form_of_the_others(group: fddp.Group):
    rows = np.array([]) if group.rank == 0 else np.full((2, 4), group.rank, np.float32)
    got = fddp.gather_rows({"x": rows}, group=group)["x"]
    assert got.dtype == np.float32
    assert np.array_equal(got, np.repeat(np.arange(1, group.size), 2)[:, None] * np.ones(4))


@claim()
def rows_of_another_form_on_one_rank_are_an_error_on_all(group: fddp.Group):
    for odd_rows in (np.zeros((3, 2), np.float32), np.zeros((3, 4), np.float64)):
        rows = odd_rows if group.rank == group.size - 1 else np.zeros((3, 4), np.float32)
        message = error_of(lambda rows=rows: fddp.gather_rows({"x": rows}, group=group))
        assert "ranks differ in their rows" in message and "a row of x float32[4]" in message
    message = error_of(
        lambda: fddp.gather_rows(None if group.rank else "rows", group=group), TypeError
    )
    assert (
        "rank 0: TypeError: fddp.gather_rows: the array must be an array of numbers, got str"
        in message
    )


### Metrics

COUNTS = ([], [4, 4, 1], [3], [5, 2])  # rows of the batches of each rank: rank 0 has none
ROWS = np.sin(np.arange(3.0 * sum(map(sum, COUNTS)))).reshape(-1, 3)


def batches(group: fddp.Group) -> list[np.ndarray]:
    """The batches of this rank."""
    offsets = np.cumsum([0, *map(sum, COUNTS)])
    counts = COUNTS[group.rank]
    local_rows = ROWS[offsets[group.rank] : offsets[group.rank + 1]]
    return np.split(local_rows, np.cumsum(counts)[:-1]) if counts else []


def metrics(w: Any, x: Any) -> Any:
    weight = jnp.sum(x[:, 0] > 0)  # in no batch as many as rows
    return {
        "error": jnp.mean((x @ w) ** 2),
        "where": fddp.Weighted(jnp.sum(x[:, 1] * (x[:, 0] > 0)) / weight, weight),
    }


@claim()
def metrics_are_means_over_the_rows_of_all_ranks_however_many_batches_each_has(group: fddp.Group):
    rows = ROWS[: sum(map(sum, COUNTS[: group.size]))]
    w = np.array([1.0, -2.0, 0.5])
    with jax.enable_x64(True):
        for shard in (None, "state"):
            step = fddp.train_step(
                lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1), group=group, shard=shard
            )
            got = fddp.evaluate(metrics, step.init(w), batches(group), group=group)
            expected = {
                "error": np.mean((rows @ w) ** 2),
                "where": np.mean(rows[rows[:, 0] > 0, 1]),
            }
            np.testing.assert_allclose(
                [got["error"], got["where"]], [*expected.values()], rtol=1e-14
            )
            assert same_on_all_ranks(group, got)


@claim()
def a_metric_that_fails_on_one_rank_is_an_error_on_all_which_may_go_on(group: fddp.Group):
    last = group.size - 1

    def broken(w: Any, x: Any) -> Any:
        raise ZeroDivisionError("no rows above zero")

    metric = broken if group.rank == last else metrics
    message = error_of(
        lambda: fddp.evaluate(metric, np.ones(3), batches(group), group=group), RuntimeError
    )
    assert (
        f"1 of {group.size} ranks failed.\nrank {last}: ZeroDivisionError: no rows above zero"
        in message
    ), message
    message = error_of(lambda: fddp.evaluate(metrics, np.ones(3), [], group=group))
    assert "no rank has a batch" in message
    failing = (lambda w, x: jnp.mean(x)) if group.rank == last else metrics
    message = error_of(lambda: fddp.evaluate(failing, np.ones(3), [ROWS[:2]], group=group))
    assert (
        "ranks differ in their metrics" in message
        and f"rank {last}: metric value float64[]" in message
    ), message
    assert (
        fddp.evaluate(
            lambda w, x: jnp.mean(x[:, 0]), (), [np.full((group.rank, 1), 2.0)], group=group
        )
        == 2
    )


### Loaders


def refilled(batches: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields each batch in one buffer, with junk in it as soon as the next one is asked for."""
    buffer = np.empty_like(batches[0])
    for batch in batches:
        buffer[:] = batch
        yield buffer
        buffer[:] = 1e3


@claim(sizes=(2,))
def a_loader_may_refill_one_buffer(group: fddp.Group):
    shape = 4, 16 * group.size // group.processes, 512
    batches = list(np.sin(np.arange(np.prod(shape), dtype=np.float32) + group.rank).reshape(shape))
    params = np.cos(np.arange(512 * 512, dtype=np.float32)).reshape(512, 512) / 30

    def loss_fn(w: Any, x: Any) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def trained(batches: Iterable[np.ndarray]) -> Any:
        step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group)
        state = step.init(params)
        for number, batch in enumerate(batches):
            state, _ = (step if number % 2 else step.no_sync)(state, batch)
        return np.asarray(state.params.addressable_shards[0].data)

    np.testing.assert_array_equal(trained(refilled(batches)), trained(batches))
    got, expected = (
        fddp.evaluate(loss_fn, params, rows, group=group) for rows in (refilled(batches), batches)
    )
    assert got == expected
