"""An array is cut into parts, one for each replica, and the parts are joined to the array."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from fddp.buckets import ShardLayout, leaf_layout, make_plan, plan_of_parts

SHAPES = [((5, 7, 3), 5), ((5, 7, 3), 1), ((4,), 4), ((), 1), ((3, 0), 1), ((1, 9), 1)]


@pytest.mark.quick("8-shape0-5", "2-shape2-4", "1-shape5-1", "8-shape4-1", "2-shape1-1")
@pytest.mark.parametrize(("shape", "depth"), SHAPES)
@pytest.mark.parametrize("n", [1, 2, 8])
def test_parts_are_put_together_to_the_array_and_the_rest_is_padding(
    shape: tuple[int, ...], depth: int, n: int
):
    x = 1 + np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    layout = ShardLayout(shape, n, depth)
    parts = layout.split(jnp.asarray(x))
    assert parts.shape == (n, *layout.dims)
    np.testing.assert_array_equal(layout.join(parts), x)
    # As they lie next to each other in one array of all replicas.
    np.testing.assert_array_equal(layout.join(parts.reshape(-1, *parts.shape[2:])), x)
    for k in range(n):
        index = jnp.int32(k)
        np.testing.assert_array_equal(layout.part(jnp.asarray(x), index), parts[k])
        np.testing.assert_array_equal(layout.mask(index), parts[k] != 0)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_some_layers_of_a_part_are_the_part_of_these_layers(n: int):
    x = jnp.arange(6 * 7 * 5.0).reshape(6, 7, 5)
    parts = ShardLayout(x.shape, n, depth=6).split(x)
    for begin, end in ((0, 2), (2, 5), (5, 6)):
        layers = x[begin:end]
        of_slice = ShardLayout(layers.shape, n, depth=end - begin).split(layers)
        np.testing.assert_array_equal(of_slice.reshape(n, end - begin, -1), parts[:, begin:end])


def test_a_stack_is_known_by_its_form_and_padding_is_less_than_three_percent():
    for shape in ((12, 768, 768), (12, 768), (126, 4096), (2, 1000), (48, 33, 31), (3, 3, 64, 64)):
        for n in (1, 2, 3, 7, 8, 16):
            size = int(np.prod(shape))
            layout = leaf_layout(shape, n)
            layers = shape[0] if len(shape) > 2 and size // shape[0] >= 32 * n else 1
            assert layout.depth == layers
            assert layout.padding * 32 < size
    for shape in (
        (50257, 768),
        (768, 12, 64),
        (768, 3072),
        (1, 4096),
        (4096,),
        (),
    ):  # tables, matrices, vectors
        assert leaf_layout(shape, 8).depth == 1
    # Statistics of each column of a stack, for example.
    assert leaf_layout((12, 768, 768), 8).of((12, 768)).depth == 1


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
