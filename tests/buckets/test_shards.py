"""Parts of arrays, one for each replica."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from fddp.buckets import (
    depth_of,
    make_plan,
    of_rows,
    own_part,
    part_dims,
    plan_of_parts,
    split_into_shards,
    there,
)

SHAPES = [((5, 7, 3), 5), ((5, 7, 3), 1), ((4,), 4), ((), 1), ((3, 0), 1), ((1, 9), 1)]


@pytest.mark.quick("8-shape0-5", "2-shape2-4", "1-shape5-1", "8-shape4-1", "2-shape1-1")
@pytest.mark.parametrize(("shape", "depth"), SHAPES)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_parts_are_put_together_to_the_array_and_the_rest_is_padding(
    shape: tuple[int, ...], depth: int, n: int
):
    x = 1 + np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    shards = split_into_shards(jnp.asarray(x), n, depth)
    assert shards.shape == (n, *part_dims(x.size, n, depth))
    np.testing.assert_array_equal(of_rows(shards, shape, depth), x)
    # As they lie next to each other in one array of all replicas.
    np.testing.assert_array_equal(of_rows(shards.reshape(-1, *shards.shape[2:]), shape, depth), x)
    for k in range(n):
        index = jnp.int32(k)
        np.testing.assert_array_equal(own_part(jnp.asarray(x), n, index, depth), shards[k])
        np.testing.assert_array_equal(there(x.size, n, index, depth), shards[k] != 0)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_some_layers_of_a_part_are_the_part_of_these_layers(n: int):
    x = jnp.arange(6 * 7 * 5.0).reshape(6, 7, 5)
    shards = split_into_shards(x, n, 6)
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        of_slice = split_into_shards(x[begin:end], n, end - begin)
        np.testing.assert_array_equal(of_slice.reshape(n, end - begin, -1), shards[:, begin:end])


def test_a_stack_is_known_by_its_form_and_padding_is_less_than_three_percent():
    for shape in ((12, 768, 768), (12, 768), (126, 4096), (2, 1000), (48, 33, 31), (3, 3, 64, 64)):
        for n in (1, 2, 3, 7, 8, 16):
            size = int(np.prod(shape))
            depth = depth_of(size, shape, n)
            assert depth == (shape[0] if len(shape) > 2 and size // shape[0] >= 32 * n else 1)
            padding = n * np.prod(part_dims(size, n, depth)) - size
            assert padding * 32 < size
    for shape in (
        (50257, 768),
        (768, 12, 64),
        (768, 3072),
        (1, 4096),
        (4096,),
        (),
    ):  # tables, matrices, vectors
        assert depth_of(int(np.prod(shape)), shape, 8) == 1
    assert (
        depth_of(12 * 768, (12, 768, 768), 8) == 1
    )  # for example statistics of each of its columns


def test_padding_counts_each_layer_of_a_stack_once():

    plan = replace(
        make_plan({"stack": np.zeros((4, 1, 101), np.float32), "w": np.zeros(5, np.float32)}),
        parts=3,
    )
    assert plan.padding == 4 * (4 * 1 + 1)
    assert {leaf.name: leaf.shape for leaf in plan_of_parts(plan).leaves} == {
        "stack": (4, 34),
        "w": (2,),
    }
