"""Convolutions by dots are those of XLA, whatever the geometry, and shapes choose between them.

The truth is `jax.lax.conv_general_dilated`, in float64.
"""

import random
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from trees import close

import fddp
from fddp.modules.convolution import by_dots

LAYOUT = ("NHWC", "HWIO", "NHWC")


def convolution(seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """Images, a kernel and the geometry of a random convolution."""
    draw = random.Random(seed)
    dims = draw.choice((1, 2, 2, 3))
    groups = draw.choice((1, 1, 2, 4))
    letters = "XYZ"[:dims]
    layout = tuple("".join(draw.sample(known + letters, dims + 2)) for known in ("NC", "IO", "NC"))
    depth = draw.randint(1, 3)
    sizes = {"N": draw.randint(1, 3), "C": groups * depth, "I": depth, "O": groups * 2}
    image = sizes | {letter: draw.randint(3, 7) for letter in letters}
    window = sizes | {letter: draw.randint(1, 3) for letter in letters}
    padding = draw.choice(("SAME", "VALID", "SAME_LOWER", "numbers"))
    dilated = padding == "numbers"
    # Dilated by 1, a window of 3 elements is no larger than the smallest image.
    wide = [draw.choice((1, 2)) if window[x] < 3 else 1 for x in letters]
    geometry = {
        "window_strides": [draw.randint(1, 3) for _ in letters],
        "padding": [(draw.randint(0, 2), draw.randint(-1, 2)) for _ in letters]
        if dilated
        else padding,
        "lhs_dilation": [draw.choice((1, 2)) for _ in letters] if dilated else None,
        "rhs_dilation": wide,
        "dimension_numbers": layout,
        "feature_group_count": groups,
    }
    normal = np.random.default_rng(seed).normal
    return (
        jnp.asarray(normal(size=[image[x] for x in layout[0]])),
        jnp.asarray(normal(size=[window[x] for x in layout[1]])),
        geometry,
    )


@pytest.mark.quick("0")
@pytest.mark.parametrize("seed", range(8))
def test_dots_are_the_convolution_and_so_are_their_gradients(seed, x64):
    x, kernel, geometry = convolution(seed)
    convolved = {}
    for convolve in (jax.lax.conv_general_dilated, by_dots):
        output, pullback = jax.vjp(partial(convolve, **geometry), x, kernel)
        convolved[convolve] = output, pullback(jnp.sin(output))
    close(convolved[by_dots], convolved[jax.lax.conv_general_dilated], rtol=1e-11)


def is_by_dots(x: Any, kernel: Any, **geometry: Any) -> bool:
    """True if a convolution with padding 1 becomes dots; its values are compared too."""
    geometry = {"window_strides": (1, 1), "padding": [(1, 1)] * 2, **geometry}
    arguments = {"dimension_numbers": LAYOUT, **geometry}
    convolve = partial(fddp.conv_general_dilated, **arguments)
    x, kernel = (np.random.default_rng(3).normal(size=size) for size in (x, kernel))
    close(convolve(x, kernel), jax.lax.conv_general_dilated(x, kernel, **arguments), rtol=1e-11)
    return "conv_general_dilated" not in str(jax.make_jaxpr(convolve)(x, kernel))


def test_windows_of_one_element_groups_and_small_images_become_dots(x64):
    assert is_by_dots((2, 8, 8, 3), (1, 1, 3, 4))
    assert is_by_dots((2, 8, 8, 4), (3, 3, 2, 4), feature_group_count=2)
    assert is_by_dots((2, 8, 8, 4), (3, 3, 1, 4), feature_group_count=4)
    assert is_by_dots((3, 2, 2, 3), (3, 3, 3, 4))  # of fewer elements than the window


def test_few_rows_become_dots_and_many_stay_with_xla(x64):
    assert is_by_dots((1, 4, 4, 3), (3, 3, 3, 16))  # 16 rows for 16 channels
    assert not is_by_dots((1, 4, 4, 3), (3, 3, 3, 15))
    assert is_by_dots((1, 8, 8, 3), (3, 3, 3, 16), window_strides=(2, 2))


def test_groups_of_images_and_empty_outputs_stay_with_xla(x64):
    assert not is_by_dots((2, 4, 4, 3), (3, 3, 3, 16), batch_group_count=2)
    assert not is_by_dots((0, 4, 4, 3), (3, 3, 3, 16))


def test_dots_have_a_forward_mode(x64):
    x, kernel, geometry = convolution(1)
    convolve = partial(by_dots, **geometry)
    output, tangent = jax.jvp(convolve, (x, kernel), (x, kernel))
    close(tangent, 2 * output, rtol=1e-11)  # linear in each


@pytest.mark.steps
def test_dots_add_in_32_bits():
    # In bfloat16 1 + 2⁻⁹ is 1, and so would be all further sums.
    x = jnp.full((1, 33, 1), 2.0**-9, jnp.bfloat16).at[0, 0].set(1)
    kernel = jnp.ones((33, 1, 1), jnp.bfloat16)
    for groups in (1, 2):
        y = by_dots(
            jnp.tile(x, (1, 1, groups)),
            jnp.tile(kernel, (1, 1, groups)),
            (1,),
            "VALID",
            dimension_numbers=("NXC", "XIO", "NXC"),
            feature_group_count=groups,
        )
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(y.astype(np.float32), 1 + 2.0**-4)


def test_flax_takes_the_function(x64):
    x = jnp.asarray(np.random.default_rng(5).normal(size=(2, 3, 3, 4)))
    options: dict[str, Any] = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    by_fddp: dict[str, Any] = options | {"conv_general_dilated": fddp.conv_general_dilated}
    plain, variables = nn.Conv(16, (3, 3), **options).init_with_output(jax.random.key(0), x)
    close(nn.Conv(16, (3, 3), **by_fddp).apply(variables, x), plain, rtol=1e-11)
    results = [
        nnx.Conv(4, 16, (3, 3), rngs=nnx.Rngs(0), **given)(x) for given in (options, by_fddp)
    ]
    close(results[1], results[0], rtol=1e-11)
