"""The sampler: every row once an epoch, the same batches on any number of processes, a restart at
any step."""

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Int

import fddp

counts = st.integers(1, 60)
locals_ = st.integers(1, 5)
sizes = st.integers(1, 4)
flags = st.booleans()
SOUND: dict[str, Any] = {"rows": 50, "batch": 8, "size": 2}


def epoch_samples(
    rows: int, batch: int, epoch: int, **options: Any
) -> Int[np.ndarray, "steps local"]:
    """The rows that a rank reads in an epoch."""
    steps = rows // batch if options.get("drop_last") else math.ceil(rows / batch)
    return np.stack(
        [*islice(fddp.samples(rows, batch, start_step=epoch * steps, **options), steps)]
    )


def shares(
    rows: int, batch: int, size: int, epoch: int = 0, **options: Any
) -> Int[np.ndarray, "size steps local"]:
    """The rows that each rank reads in an epoch."""
    return np.stack(
        [epoch_samples(rows, batch, epoch, rank=rank, size=size, **options) for rank in range(size)]
    )


def first(count: int, *args: Any, **options: Any) -> list[list[int]]:
    return [step.tolist() for step in islice(fddp.samples(*args, **options), count)]


### An epoch


@given(counts, locals_, sizes, flags)
def test_an_epoch_reads_every_row_equally_often_but_for_its_padding(
    rows: int, local: int, size: int, shuffle: bool
):
    batch = local * size
    read = shares(rows, batch, size, shuffle=shuffle)
    often = np.bincount(read.ravel(), minlength=rows)
    assert len(often) == rows and often.min() >= 1 and often.max() - often.min() <= 1
    assert read.shape == (size, math.ceil(rows / batch), local)


@given(counts, locals_)
def test_padding_repeats_the_epoch_from_its_front(rows: int, batch: int):
    order = epoch_samples(rows, batch, 0).ravel()
    assert sorted(order[:rows]) == list(range(rows))
    np.testing.assert_array_equal(order[rows:], order[: len(order) - rows])


def test_padding_goes_round_as_often_as_it_takes():
    assert first(2, 3, 8, shuffle=False) == [[0, 1, 2, 0, 1, 2, 0, 1]] * 2


@given(counts, locals_, sizes)
def test_drop_last_leaves_out_only_what_fills_no_batch(rows: int, local: int, size: int):
    batch = local * size
    if rows >= batch:
        read = shares(rows, batch, size, drop_last=True)
        assert read.shape == (size, rows // batch, local)
        assert len(np.unique(read)) == read.size
        np.testing.assert_array_equal(read, shares(rows, batch, size)[:, : rows // batch])


# Peer: test_DistributedSampler_padding of PyTorch; its sampler deals out single rows, so the batch
# is one row a rank.
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_read_as_many_rows_as_with_torch(size: int):
    rows = 100 + size + 1
    tiny = max(size // 2 - 1, 1)
    dropped = math.ceil((rows - size) / size) if rows % size else rows // size
    assert shares(rows, size, size, drop_last=True).shape == (size, dropped, 1)
    assert shares(rows, size, size).shape == (size, math.ceil(rows / size), 1)
    assert shares(tiny, size, size).shape == (size, math.ceil(tiny / size), 1)


def test_ranks_read_the_rows_that_torch_deals_them():
    read = shares(11, 3, 3, shuffle=False)[
        ..., 0
    ]  # list(DistributedSampler(range(11), 3, rank, shuffle=False))
    assert read.tolist() == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 0]]


### Ranks


@given(counts, locals_, sizes)
def test_no_row_is_read_twice_in_a_step_unless_there_are_too_few(rows: int, local: int, size: int):
    if rows >= local * size:
        for step in shares(rows, local * size, size).swapaxes(0, 1):
            assert len(np.unique(step)) == step.size


@given(counts, st.sampled_from([2, 3, 4, 6, 12]), st.integers(0, 3), flags)
def test_a_step_reads_the_same_rows_on_any_number_of_processes(
    rows: int, size: int, epoch: int, shuffle: bool
):
    (single,) = shares(rows, 12, 1, epoch, shuffle=shuffle)
    together = np.concatenate(shares(rows, 12, size, epoch, shuffle=shuffle), axis=1)
    np.testing.assert_array_equal(np.sort(together, axis=1), np.sort(single, axis=1))


### The order


def test_without_shuffling_rows_come_in_order():
    assert first(5, 4, 2, shuffle=False) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


@given(counts, locals_, st.integers(0, 9), st.integers(0, 9))
def test_an_epoch_is_numpys_permutation_as_in_every_version_of_fddp(
    rows: int, batch: int, seed: int, epoch: int
):
    order = np.random.default_rng([seed, epoch]).permutation(rows)
    expected = np.resize(order, (math.ceil(rows / batch), batch))
    np.testing.assert_array_equal(epoch_samples(rows, batch, epoch, seed=seed), expected)


def test_epochs_and_seeds_differ_and_can_be_repeated():
    orders = {
        (seed, epoch): epoch_samples(40, 8, epoch, seed=seed)
        for seed in range(3)
        for epoch in range(3)
    }
    assert (
        len({order.tobytes() for order in orders.values()}) == 9
    )  # epoch 1 of seed 0 is not epoch 0 of seed 1
    for (seed, epoch), order in orders.items():
        np.testing.assert_array_equal(order, epoch_samples(40, 8, epoch, seed=seed))


@given(counts, locals_, flags)
def test_steps_are_those_of_one_epoch_after_the_other(rows: int, batch: int, shuffle: bool):
    epochs = np.concatenate(
        [epoch_samples(rows, batch, epoch, shuffle=shuffle, seed=5) for epoch in range(3)]
    )
    assert first(len(epochs), rows, batch, shuffle=shuffle, seed=5) == epochs.tolist()


### A restart


@given(counts, locals_, sizes, flags, st.integers(0, 30))
def test_a_restart_at_any_step_reads_what_would_have_come(
    rows: int, local: int, size: int, drop: bool, start: int
):
    batch = local * size
    drop = drop and rows >= batch
    for rank in range(size):
        epoch_rows = first(start + 8, rows, batch, rank=rank, size=size, drop_last=drop)
        assert (
            first(8, rows, batch, rank=rank, size=size, drop_last=drop, start_step=start)
            == epoch_rows[start:]
        )


def test_a_restart_far_away_replays_nothing():
    step = 10**15 + 1
    assert first(1, 10, 4, start_step=step) == [epoch_samples(10, 4, step // 3)[step % 3].tolist()]


def test_a_restart_with_another_number_of_processes_goes_on_with_the_same_batches():
    uninterrupted = first(10, 50, 12, seed=1)
    ranks = [first(4, 50, 12, seed=1, rank=rank, size=3, start_step=6) for rank in range(3)]
    for step, batch in enumerate(uninterrupted[6:]):
        assert sorted(row for rank in ranks for row in rank[step]) == sorted(batch)


### Errors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 0}, "rows must be a whole number of 1 or more, got 0"),
        ({"batch": 0}, "batch must be a whole number of 1 or more, got 0"),
        ({"size": 0}, "size must be a whole number of 1 or more, got 0"),
        ({"rank": -1}, "rank must be a whole number of 0 or more, got -1"),
        ({"rank": 2}, "rank must be below size, 2, got 2"),
        ({"batch": 7}, r"batch must be a multiple of size, 2, got 7: .* give 8\."),
        ({"batch": 64, "drop_last": True}, "batch must be at most rows, 50, got 64"),
        ({"seed": -3}, "seed must be a whole number of 0 or more, got -3"),
        ({"start_step": -1}, "start_step must be a whole number of 0 or more, got -1"),
        ({"rows": np.zeros(50)}, "rows must be a whole number of 1 or more, got array"),
        ({"batch": 8.0}, "batch must be a whole number of 1 or more, got 8.0"),
        ({"rank": True}, "rank must be a whole number of 0 or more, got True"),
        ({"seed": None}, "seed must be a whole number of 0 or more, got None"),
    ],
)
def test_a_value_out_of_range_is_named_before_the_first_step(change: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        fddp.samples(**(SOUND | change))


@pytest.mark.parametrize("name", ["drop_last", "shuffle"])
def test_a_value_of_another_kind_is_named_before_the_first_step(name: str):
    options: Any = {name: "no"}
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 'no'"):
        fddp.samples(50, 8, **options)


def test_numpys_whole_numbers_are_numbers():
    narrow = map(np.uint8, (250, 4))
    assert first(99, *narrow, size=np.uint8(2)) == first(99, 250, 4, size=2)
