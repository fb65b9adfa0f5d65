"""A shuffle by index: every row once, orders as frequent as those of chance, no memory for rows."""

import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fddp
from fddp.data.by_index import Shuffled


def order(rows: int, epoch: int, seed: int = 7) -> np.ndarray:
    return Shuffled(rows, seed, epoch)(np.arange(rows))


def excess(observed: np.ndarray, expected: float, freedom: int) -> float:
    """Chi squared in standard deviations above its mean."""
    return (np.sum((observed - expected) ** 2) / expected - freedom) / np.sqrt(2 * freedom)


@given(st.integers(1, 3000), st.integers(0, 5))
def test_every_row_comes_once(rows: int, epoch: int):
    assert sorted(order(rows, epoch)) == list(range(rows))


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_all_orders_of_a_few_rows_are_equally_frequent(rows: int):
    kinds, each = [*permutations(range(rows))], 20
    seen = Counter(tuple(order(rows, epoch).tolist()) for epoch in range(each * len(kinds)))
    assert excess(np.array([seen[kind] for kind in kinds]), each, len(kinds) - 1) < 4


@pytest.mark.parametrize("rows", [50, 97, 128])
def test_rows_come_at_every_position_and_after_every_row_equally_often(rows: int):
    epochs = 1500
    orders = np.stack([order(rows, epoch) for epoch in range(epochs)])
    places = np.stack([np.bincount(column, minlength=rows) for column in orders.T])
    assert excess(places, epochs / rows, (rows - 1) ** 2) < 4
    distances = np.bincount(((orders[:, 1:] - orders[:, :-1]) % rows).ravel(), minlength=rows)
    assert excess(distances[1:], epochs, rows - 2) < 4


def test_the_orders_of_epochs_and_seeds_are_not_alike():
    orders = [order(10_000, epoch, seed) for seed in range(3) for epoch in range(3)]
    likeness = np.corrcoef([np.arange(10_000), *orders]) - np.eye(10)
    assert abs(likeness).max() < 0.05  # five standard deviations


def test_a_batch_of_very_many_rows_needs_no_memory_for_them():
    rows = 10**15 + 7
    tracemalloc.start()
    try:
        batch = next(fddp.samples(rows, 256, shuffle="index", start_step=10**12))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6
    assert len(np.unique(batch)) == 256 and 0 <= batch.min() < rows / 20 and batch.max() < rows
