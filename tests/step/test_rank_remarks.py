"""Ranks with the same rows are reported once; the other data in a comparison may differ."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fddp
from fddp.comm import verify_beside
from fddp.step.rank_remarks import DIGEST, ROWS, digest, tell_same_rows

X = np.random.default_rng(0).normal(size=(12, 3))


def test_equal_first_rows_have_one_digest_wherever_they_lie():
    assert digest(np.float32(X)) == digest(jnp.float32(X))
    assert digest(np.float32(X)) != digest(np.float32(X[::-1]))
    assert digest(np.float32(X)) == digest(np.float32(np.concatenate([X[:ROWS], X])))


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
    assert digest(batch) == bytes(DIGEST)


def test_rank_0_names_the_ranks_that_bring_the_same_rows(
    group: Callable[[int], fddp.Group], capfd: Any
):
    same = digest(X)
    other_digest = digest(X[1:])
    nothing = bytes(DIGEST)
    tell_same_rows(group(1), [same, other_digest, nothing, same, nothing])
    words = capfd.readouterr().err
    assert words.startswith("fddp: ranks 0, 3 pass the same first rows") and "fddp.samples" in words
    tell_same_rows(group(1), [same, other_digest, nothing, nothing])
    assert capfd.readouterr().err == ""


def test_what_travels_beside_a_comparison_comes_back_filled_up(group: Callable[[int], fddp.Group]):
    assert verify_beside(group(1), "nothing", list, list, lambda verdicts: b"abc") == (
        [],
        [b"abc" + bytes(29)],
    )
    assert verify_beside(group(1), "nothing", list, list, lambda verdicts: b"") == ([], [bytes(32)])
