"""Convolutions as dots, where XLA's own are slow on CPUs.

XLA:CPU computes some convolutions many times slower than others of as many products: those of
groups, those with windows larger than the image, and 1x1. There, the input under each tap of the
window is a matrix of rows and channels, whose dots with the kernel are the convolution.
bench/convolutions.py measures both; PyTorch and Caffe call it im2col.

Source: Chellapilla, Puri & Simard, "High Performance Convolutional Neural Networks for Document
Processing" (2006).
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Array:
    """`jax.lax.conv_general_dilated`, as dots where XLA's convolution is slower on CPUs.

    The shapes decide: groups, windows of one element or of more than the image, and batches whose
    output has no more rows (images times pixels) than channels become dots. Everything else is
    XLA's convolution, also with `batch_group_count` or `out_sharding`. The results differ by
    rounding. On GPUs use `jax.lax`'s function.

    Args:
      lhs: the images, in the layout of `dimension_numbers`.
      rhs: the kernel, in the layout of `dimension_numbers`, of the same dtype.
      window_strides: for each spatial dim the elements between two windows.
      padding: "SAME", "SAME_LOWER", "VALID", or for each spatial dim the elements before and after.
      lhs_dilation: for each spatial dim the distance between elements of the images; 1 by default.
      rhs_dilation: for each spatial dim the distance between elements of the kernel; 1 by default.
      dimension_numbers: the layouts, as of `jax.lax`; NCHW, OIHW and NCHW by default.
      feature_group_count: groups of input channels, each with output channels of its own.
      batch_group_count: groups of images.
      precision: of the products, as of `jax.lax.dot_general`.
      preferred_element_type: the dtype of sums and result; by default that of `lhs`.
      out_sharding: the sharding of the output on an Explicit mesh.

    Returns:
      The output, as of `jax.lax.conv_general_dilated`.

    Raises:
      TypeError, ValueError: as of `jax.lax.conv_general_dilated`.

    Example:
      >>> import fddp, flax.linen as nn, jax, jax.numpy as jnp
      >>> conv = nn.Conv(4, (3, 3), conv_general_dilated=fddp.conv_general_dilated)
      >>> y, _ = conv.init_with_output(jax.random.key(0), jnp.ones((2, 8, 8, 1)))
      >>> y.shape
      (2, 8, 8, 4)
    """
    geometry = (window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers)
    dtypes = (precision, preferred_element_type)

    def by_xla(lhs: Array, rhs: Array) -> Array:
        groups = (feature_group_count, batch_group_count)
        return lax.conv_general_dilated(lhs, rhs, *geometry, *groups, *dtypes, out_sharding)

    output = jax.eval_shape(by_xla, lhs, rhs)  # refuses arguments that do not fit
    if batch_group_count > 1 or out_sharding is not None or 0 in (output.size, rhs.size):
        return by_xla(lhs, rhs)
    spec = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    pixels = prod(lhs.shape[dim] for dim in spec.lhs_spec[2:])
    window = prod(rhs.shape[dim] for dim in spec.rhs_spec[2:])
    channels = rhs.shape[spec.rhs_spec[0]]
    rows = output.size // channels
    # bench/convolutions.py measured this rule, for forward and backward pass together. XLA swaps an
    # image with a window of more elements, and then computes each product by itself. Elsewhere the
    # copies under the taps are to be no larger than the kernel.
    if feature_group_count == 1 < window <= pixels and rows > channels:
        return by_xla(lhs, rhs)
    return by_dots(lhs, rhs, *geometry, feature_group_count, *dtypes)


def by_dots(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """The convolution as dots of the input under each tap of the window with the kernel."""
    (batch, in_dim, *spatial), (out_dim, kernel_dim, *taps), out_spec = lax.conv_dimension_numbers(
        lhs.shape, rhs.shape, dimension_numbers
    )
    ones = [1] * len(spatial)
    window = [rhs.shape[dim] for dim in taps]
    starts = [range(0, n * step, step) for n, step in zip(window, rhs_dilation or ones)]
    if isinstance(padding, str):
        image = [lhs.shape[dim] for dim in spatial]
        padding = lax.padtype_to_pads(image, [x[-1] + 1 for x in starts], window_strides, padding)
    edges = [(low, high, step - 1) for (low, high), step in zip(padding, lhs_dilation or ones)]
    images = jnp.transpose(lhs, (batch, *spatial, in_dim))
    images = lax.pad(images, jnp.zeros((), lhs.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    inputs = [_under(images, tap, starts, window_strides) for tap in product(*starts)]
    if feature_group_count == 1:  # one dot for all taps is faster than the sum of one for each
        inputs = [jnp.concatenate(inputs, -1)]
    kernel = jnp.transpose(rhs, (*taps, kernel_dim, out_dim))
    dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    result = _sum_of_dots(inputs, kernel, feature_group_count, precision, dtype)
    return jnp.moveaxis(result, range(result.ndim), (out_spec[0], *out_spec[2:], out_spec[1]))


def _under(
    images: Array, tap: Sequence[int], starts: Sequence[range], strides: Sequence[int]
) -> Array:
    """The elements of images under one tap of the window, at all its places."""
    rows, *sizes, channels = images.shape
    ends = [size - start[-1] + at for size, start, at in zip(sizes, starts, tap)]
    return lax.slice(images, [0, *tap, 0], [rows, *ends, channels], [1, *strides, 1])


def _sum_of_dots(
    inputs: Sequence[Array], kernel: Array, groups: int, precision: Any, dtype: jnp.dtype
) -> Array:
    """Sums the products of inputs and their parts of a kernel, in at least 32 bits."""
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    parts = kernel.reshape(len(inputs), -1, groups, kernel.shape[-1] // groups)
    dots = [
        jnp.einsum(
            "...gi,igo->...go",
            x.reshape(*x.shape[:-1], groups, -1),
            part,
            precision=precision,
            preferred_element_type=wide,
        )
        for x, part in zip(inputs, parts)
    ]
    total = sum(dots[1:], dots[0])
    return total.reshape(*total.shape[:-2], -1).astype(dtype)
