"""Memory for received messages is reused, but never while it is still read."""

import jax
import numpy as np
import pytest

from fddp.comm.mpi_transport import ALIGNMENT, receive_buffers


@pytest.mark.parametrize("look", [lambda x: x[1:], lambda x: x[1:].view(np.uint32)])
def test_memory_that_is_looked_into_is_not_given_out_again(look):
    like = receive_buffers()
    first = like(np.zeros(1000, np.float32))
    first[:] = 7
    address = first.ctypes.data
    view = look(first)
    expected = np.array(view)
    del first
    second = like(np.zeros(1000, np.float32))
    second[:] = 8
    np.testing.assert_array_equal(np.asarray(view), expected)
    assert second.ctypes.data != address


def test_a_jax_array_takes_the_memory_over_and_gives_it_back():
    like = receive_buffers()
    first = like(np.zeros(1000, np.float32))
    first[:] = 7
    address = first.ctypes.data
    array = jax.device_put(first, jax.devices()[0])
    assert array.unsafe_buffer_pointer() == address, "copied"
    del first
    second = like(np.zeros(1000, np.float32))
    second[:] = 8
    assert second.ctypes.data != address and np.all(np.asarray(array) == 7)
    del array
    jax.block_until_ready(
        jax.device_put(np.zeros(1)) + 1
    )  # JAX lets go of memory that is not its own at its next call
    assert like(np.zeros(1000, np.float32)).ctypes.data == address


def test_arrays_are_aligned_and_of_the_asked_size_and_dtype():
    like = receive_buffers()
    for size, dtype in (
        (1, np.float32),
        (17, np.float64),
        (5, np.uint8),
        (17, np.float32),
        (34, np.uint16),
    ):
        got = like(np.zeros(size, dtype))
        assert got.shape == (size,) and got.dtype == dtype and got.ctypes.data % ALIGNMENT == 0
        got[:] = 1
