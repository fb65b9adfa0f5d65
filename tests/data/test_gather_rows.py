"""The rows of all ranks; that real ranks gather as many as each has is held in
`on_ranks/evaluation.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fddp


def test_gathered_rows_keep_every_bit_dtype_and_structure(group, monkeypatch):
    monkeypatch.setattr(
        "fddp.comm.host_bytes.CHUNK_BYTES", 5
    )  # in many messages; no array is a whole number of them
    tree = {
        "bf16": jnp.array([[np.nan, -0.0, 1 / 3]], jnp.bfloat16),
        "f64": np.array([1 / 3, -np.inf]),
        "flags": np.array([[True], [False]]),
        "empty": np.zeros((0, 3), np.int64),
        "narrow": np.zeros((2, 0), np.int8),
        "none": None,
    }
    got = fddp.gather_rows(tree, group=group(2))
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for x, expected in zip(jax.tree.leaves(got), map(np.asarray, jax.tree.leaves(tree))):
        assert (x.dtype, x.shape, x.tobytes()) == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1, 2], r"the array\[0\] must be an array of numbers, got int"),
        (np.array(["cat"]), "must be an array of numbers, got <U3"),
        (
            {"seen": jax.random.split(jax.random.key(0))},
            r"the array\['seen'\] must be an array of numbers, got key",
        ),
        (jnp.zeros(()), r"has no dims, and rows lie along the first: give x\[None\]"),
    ],
)
def test_what_has_no_rows_of_numbers_is_refused(group, tree: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=f"fddp.gather_rows: .*{message}"):
        fddp.gather_rows(tree, group=group(2))
