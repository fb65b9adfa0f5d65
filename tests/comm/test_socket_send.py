"""A lane's messages over TCP arrive, and are added in order of ranks."""

import select
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fddp.comm import Hosts, Journal
from fddp.comm.program_lane import ProgramLane
from fddp.comm.rank_connections import connect_ranks
from fddp.comm.socket_send import BLOCK_BYTES, PIECE_BYTES, SMALL_BYTES, SocketSend
from fddp.program import Kind, exchange

DTYPES = [
    *("float32", "float64", "int32", "int64", "complex64", "complex128", "bool"),
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16"),
]
SIZES = (1, 2, 5, 1000, SMALL_BYTES // 4 + 1, BLOCK_BYTES // 2 + 3)
Levels = Callable[[int], Sequence[Sequence[int]]]


def on_threads(ranks: int, call: Callable[[int], Any]) -> list[Any]:
    """The results of `call(rank)`, each on a thread of its own."""
    results: list[Any] = [None] * ranks
    errors = list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results


def pairs(ranks: int) -> list[dict[int, socket.socket]]:
    connections = [dict[int, socket.socket]() for _ in range(ranks)]
    with socket.create_server(("127.0.0.1", 0)) as door:
        for one in range(ranks):
            for other in range(one):
                connections[one][other] = socket.create_connection(door.getsockname())
                connections[other][one] = door.accept()[0]
    return connections


def sent(
    kind: Kind, arrays: Sequence[np.ndarray], levels: Levels = lambda rank: ()
) -> list[np.ndarray]:
    """What each rank has after the exchange of an array per rank."""
    connections = pairs(len(arrays))

    def run(rank: int) -> np.ndarray:
        array = arrays[rank].copy()
        SocketSend(rank, connections[rank], levels(rank))(kind, array)
        return array

    return on_threads(len(arrays), run)


def drawn(ranks: int, shape: Any, dtype: np.dtype) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    real, imaginary = 50 * draw.normal(size=(2, ranks, *shape))
    numbers = real + 1j * imaginary if dtype.kind == "c" else real
    return [x.astype(dtype) for x in numbers]


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_have_the_bits_of_a_sum_in_order_of_ranks(ranks: int, dtype: str):
    for size in SIZES:
        arrays = drawn(ranks, (size,), np.dtype(dtype))
        expected = arrays[0]
        for array in arrays[1:]:
            expected = expected + array
        for result in sent("sum", arrays):
            assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_arrive_at_the_ranks_of_their_numbers_and_gathers_everywhere(ranks: int):
    for size in SIZES:
        arrays = drawn(ranks, (ranks, size), np.dtype(np.float32))
        for rank, rows in enumerate(sent("exchange", arrays)):
            np.testing.assert_array_equal(rows, [x[rank] for x in arrays])
        for rows in sent("gather", arrays):
            np.testing.assert_array_equal(rows, [x[0] for x in arrays])


def test_a_sum_in_two_levels_adds_the_sums_of_hosts():
    hosts = [(0, 1), (2, 3)]
    levels: Levels = lambda rank: [x for x in (*hosts, *zip(*hosts)) if rank in x]  # noqa: E731
    for size in SIZES:
        arrays = drawn(4, (size,), np.dtype(np.float64))
        expected = (arrays[0] + arrays[1]) + (arrays[2] + arrays[3])
        for result in sent("sum", arrays, levels):
            assert result.tobytes() == expected.tobytes()


def test_large_arrays_go_to_at_most_two_ranks_at_once():
    """What many hosts send to one at once overflows its switch, which drops packets."""
    connections = pairs(4)
    array = np.ones((4, PIECE_BYTES), np.uint8)
    send = SocketSend(0, connections[0])
    run = threading.Thread(target=send, args=("exchange", array), daemon=True)
    hears = lambda other, seconds: bool(select.select([other], [], [], seconds)[0])  # noqa: E731
    with ExitStack() as opened:
        for connection in [x for peers in connections[1:] for x in peers.values()]:
            opened.enter_context(connection)
        one, two, three = (connections[rank][0] for rank in (1, 2, 3))
        run.start()
        assert hears(one, 60) and hears(two, 60) and not hears(three, 0)
        three.sendall(bytes(PIECE_BYTES))  # ends the first round: rank 0 hears from rank 3 in it
        assert hears(three, 60)
        two.sendall(bytes(PIECE_BYTES))
        one.sendall(bytes(PIECE_BYTES))
        run.join(60)
    assert not run.is_alive()
    np.testing.assert_array_equal(array[1:], 0)


def test_infinite_sums_are_no_errors():
    with np.errstate(all="raise"):
        largest = np.array([np.finfo(np.float32).max, np.inf, 1], np.float32)
        arrays = [largest, largest * np.array([1, -1, 1], np.float32)]
        for result in sent("sum", arrays):
            np.testing.assert_array_equal(result, [np.inf, np.nan, 2])


def lane_of(connections: Mapping[int, socket.socket]) -> Callable[[jax.Array], jax.Array]:
    """A program of a lane that sums an array over two ranks."""
    send = SocketSend(0, connections, names=(4, 7))
    lane = ProgramLane(2, jnp.float32(1), [send], Journal())
    return jax.jit(lambda x: (exchange(lane.carrier, "sum", x, 2), lane)[0])


def test_a_rank_that_ends_while_a_program_waits_is_an_error_that_names_it():
    connections = pairs(2)
    connections[1][0].sendall(b"half")
    closing = threading.Timer(0.3, connections[1][0].close)
    closing.start()
    run = lane_of(connections[0])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="rank 7 has closed"):
        jax.block_until_ready(run(jnp.ones(1000)))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="rank 7 has closed"):
        jax.block_until_ready(run(jnp.ones(1000)))
    closing.join()


def test_ranks_connect_beside_strangers_that_call_first():
    gathered = [np.zeros(0, np.uint8)] * 3
    everyone = threading.Barrier(3)
    strangers = ExitStack()

    def all_gather(rank: int, data: np.ndarray) -> np.ndarray:
        gathered[rank] = data
        if everyone.wait(30) == 0:
            for words in (b"", b"x" * 200):
                name, port = gathered[0].tobytes().decode().split()
                stranger = socket.create_connection((name, int(port)))
                strangers.enter_context(stranger).sendall(words)
        everyone.wait(30)
        return np.stack(gathered)

    def run(rank: int) -> dict[int, socket.socket]:
        hosts: Any = Hosts((0, 1, 2), lambda data: all_gather(rank, data), lambda data, root: data)
        return connect_ranks(rank, hosts, "127.0.0.1")

    with strangers:
        connections = on_threads(3, run)
    assert [sorted(x) for x in connections] == [[1, 2], [0, 2], [0, 1]]
    array = np.arange(12.0)

    def total(rank: int) -> np.ndarray:
        mine = rank * array
        SocketSend(rank, connections[rank])("sum", mine)
        return mine

    for result in on_threads(3, total):
        np.testing.assert_array_equal(result, 3 * array)


def test_a_rank_that_does_not_connect_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fddp.comm.rank_connections.CONNECT_S", 0.3)
    hosts: Any = Hosts((4, 7), lambda data: np.stack([data, data]), lambda data, root: data)
    with pytest.raises(ConnectionError, match=r"Gloo's ranks \[7\] do not connect to rank 4"):
        connect_ranks(0, hosts, "127.0.0.1")
