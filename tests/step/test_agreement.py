"""What ranks agree on is a pure function of what each has seen: no rank is needed to test it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fddp
from fddp.buckets import SentLeaf
from fddp.sharding import Sharded
from fddp.step import WHOLE_STATE, Agreed, Replica, Strategy, TrainState
from fddp.step.agreed import DIGEST, ROWS, Common, Seen, digest_of_rows, merge, remarks

Groups = Callable[[int], fddp.Group]
X = np.random.default_rng(0).normal(size=(12, 3))
PARAMS = {"a": np.zeros(4, np.float32), "b": np.zeros(5, np.float32), "c": np.zeros(6, np.float32)}
LEAVES = range(3)


def saw(*order: int, unused: tuple[int, ...] = (), **more: Any) -> Seen:
    """What a rank has seen whose gradients are ready in this order."""
    return Seen(
        order=[SentLeaf(i) for i in order],
        uses=LEAVES,
        has_path={i: i not in unused for i in LEAVES},
        touched=dict.fromkeys(LEAVES, 0),
    )._replace(**more)


@pytest.fixture
def agreed(group: Groups) -> Callable[..., Agreed]:
    """Merges what ranks have seen, for a step of two replicas with a bucket for each leaf."""

    def of(*seen: Seen, params: Any = PARAMS, strategy: Strategy = WHOLE_STATE) -> Agreed:
        loss: Any = None  # nothing is traced again
        replica = Replica(loss, group(2), fddp.Options(bucket_cap_mb=0), strategy)
        state = TrainState(jnp.int32(0), params, (), None, (), None, None)
        common = Common(state, tuple(LEAVES), None, jax.ShapeDtypeStruct((), np.float32), (), loss)
        return merge(replica, common, seen, lambda state, mean: None)

    return of


def names(agreed: Agreed) -> list[str]:
    return [name for bucket in agreed.plan.buckets for name in bucket.names]


def test_messages_leave_in_the_order_that_rank_0_saw(agreed: Callable[..., Agreed]):
    assert names(agreed(saw(2, 0, 1), saw(0, 1, 2))) == ["c", "a", "b"]
    assert names(agreed(saw(0, 1, 2), saw(2, 0, 1))) == ["a", "b", "c"]


def test_forward_uses_are_those_of_rank_0(agreed: Callable[..., Agreed]):
    first = saw(0, 1, 2, uses=range(7, 10))
    merged = agreed(first, saw(0, 1, 2))
    assert [merged.first_use(bucket) for bucket in merged.plan.buckets] == [7, 8, 9]


def test_a_leaf_is_sent_if_any_rank_has_a_path_to_it(agreed: Callable[..., Agreed]):
    ranks = saw(2, 1, 0, unused=(0, 1)), saw(2, 1, 0, unused=(1,))
    assert names(agreed(*ranks)) == ["c", "a"]
    assert names(agreed(*ranks[::-1])) == ["c", "a"]


def test_in_shards_a_leaf_without_a_path_is_sent_last(agreed: Callable[..., Agreed]):
    assert names(agreed(saw(2, 1, 0, unused=(1,)), strategy=Sharded(shared="state"))) == [
        "c",
        "a",
        "b",
    ]


def test_rows_of_a_table_have_room_for_the_rank_that_touches_most(agreed: Callable[..., Agreed]):
    table = {"a": PARAMS["a"], "b": PARAMS["b"], "c": np.zeros((9000, 8), np.float32)}
    few, most = (saw(2, 1, 0, touched={0: 0, 1: 0, 2: count}) for count in (8, 64))
    for ranks in ((few, most), (most, few)):
        (rows,) = filter(
            None, (bucket.rows for bucket in agreed(*ranks, params=table).plan.buckets)
        )
        assert rows.most == 64


@pytest.mark.parametrize(("other", "rounds"), [("one program", 2), ("another", 1), ("", 1)])
def test_loops_hold_sums_only_if_all_ranks_have_one_program(
    agreed: Callable[..., Agreed], other: str, rounds: int
):
    order = [SentLeaf(2, 3, 2), SentLeaf(1), SentLeaf(0)]
    merged = agreed(
        *(saw(order=order, program=program) for program in ("one program", other, "one program"))
    )
    assert [bucket.rounds for bucket in merged.plan.buckets if bucket.leaves == (2,)] == [rounds]


### Remarks


def test_equal_first_rows_have_one_digest_wherever_they_lie():
    assert digest_of_rows(np.float32(X)) == digest_of_rows(jnp.float32(X))
    assert digest_of_rows(np.float32(X)) != digest_of_rows(np.float32(X[::-1]))
    assert digest_of_rows(np.float32(X)) == digest_of_rows(
        np.float32(np.concatenate([X[:ROWS], X]))
    )


@pytest.mark.parametrize(
    "batch",
    [
        np.ones((4, 2)),
        {"x": np.zeros(3), "y": 1.0},
        jax.ShapeDtypeStruct((4,), jnp.float32),
        np.zeros((0, 2)),
        (),
    ],
)
def test_of_rows_that_are_made_up_nothing_is_told(batch: Any):
    assert digest_of_rows(batch) == bytes(DIGEST)


def test_ranks_that_pass_the_same_rows_are_named():
    same, other, unknown = digest_of_rows(X), digest_of_rows(X[1:]), bytes(DIGEST)
    (words,) = remarks([saw(0, rows=rows) for rows in (same, other, unknown, same, unknown)])
    assert words.startswith("fddp: ranks 0, 3 pass the same first rows") and "fddp.samples" in words
    assert remarks([saw(0, rows=rows) for rows in (same, other, unknown, unknown)]) == []


def test_ranks_whose_losses_are_other_programs_are_named():
    (words,) = remarks([saw(0, wiring=wiring) for wiring in (b"1", b"2", b"1")])
    assert words.startswith("fddp: the losses of ranks 0, 2 and 1 are different programs.")
