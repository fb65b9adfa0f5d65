"""The words between an island and the keeper."""

import socket
import threading
import time

import numpy as np
import pytest

from fddp.local_training.frames import hear, hear_arrays, tell


def test_what_is_told_is_heard():
    one, other = socket.socketpair()
    arrays = [np.arange(6.0).reshape(2, 3), np.zeros((0, 2), np.float16), np.array(7, np.int32)]
    with one, other:
        tell(one, {"version": 3}, arrays)
        assert hear(other) == {"version": 3}
        for got, told in zip(hear_arrays(other, arrays), arrays):
            np.testing.assert_array_equal(got, told, strict=True)


def test_a_large_array_may_take_longer_than_the_timeout_while_bytes_flow():
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one.settimeout(0.5)
    array = np.arange(25_000, dtype=np.float32)
    read = bytearray()

    def reads_slowly() -> None:
        while len(read) < array.nbytes + 3:
            time.sleep(0.05)
            read.extend(other.recv(2048))

    reader = threading.Thread(target=reads_slowly)
    with one, other:
        reader.start()
        tell(one, {}, [array])
        reader.join()
    assert read == b"{}\n" + array.tobytes()


def test_one_who_reads_nothing_is_not_waited_for():
    one, other = socket.socketpair()
    one.settimeout(0.2)
    with one, other, pytest.raises(TimeoutError):
        tell(one, {}, [np.zeros(1 << 22)])
