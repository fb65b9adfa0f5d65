"""The messages between an island and the server."""

import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from fddp.comm import signature
from fddp.islands import server
from fddp.islands.merging import SharedParams
from fddp.islands.protocol import receive_arrays, receive_header, send_message
from fddp.islands.quorum import Quorum


def test_what_is_told_is_heard():
    sender, receiver = socket.socketpair()
    arrays = [np.arange(6.0).reshape(2, 3), np.zeros((0, 2), np.float16), np.array(7, np.int32)]
    with sender, receiver:
        send_message(sender, {"version": 3}, arrays)
        assert receive_header(receiver) == {"version": 3}
        for got, sent_array in zip(receive_arrays(receiver, arrays), arrays):
            np.testing.assert_array_equal(got, sent_array, strict=True)


def test_a_large_array_may_take_longer_than_the_timeout_while_bytes_flow():
    sender, receiver = socket.socketpair()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender.settimeout(0.5)
    array = np.arange(25_000, dtype=np.float32)
    read = bytearray()

    def reads_slowly() -> None:
        while len(read) < array.nbytes + 3:
            time.sleep(0.05)
            read.extend(receiver.recv(2048))

    reader = threading.Thread(target=reads_slowly)
    with sender, receiver:
        reader.start()
        send_message(sender, {}, [array])
        reader.join()
    assert read == b"{}\n" + array.tobytes()


def test_one_who_reads_nothing_is_not_waited_for():
    sender, receiver = socket.socketpair()
    sender.settimeout(0.2)
    with sender, receiver, pytest.raises(TimeoutError):
        send_message(sender, {}, [np.zeros(1 << 22)])


@pytest.mark.parametrize(
    "line", [b"5", b"[1]", b"null", b'"a"', b"\xff", b"[" * 60_000, b"GET / HTTP/1.1"]
)
def test_what_is_no_line_of_ours_is_the_end_of_a_connection(line):
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(line + b"\n")
        with pytest.raises(ConnectionResetError):
            receive_header(receiver)


def test_a_line_has_a_time_by_which_it_is_complete():
    sender, receiver = socket.socketpair()
    with sender, receiver:
        receiver.settimeout(5.0)
        began = time.monotonic()
        drips = threading.Thread(
            target=lambda: [(sender.sendall(b"x"), time.sleep(0.05)) for _ in range(20)]
        )
        drips.start()
        with pytest.raises(ConnectionResetError):
            receive_header(receiver, until=began + 0.2)
        assert time.monotonic() - began < 0.6
        drips.join()


### Refused islands


@pytest.fixture
def listener(monkeypatch):
    """A server of one parameter for two islands, which lets islands in."""
    monkeypatch.setattr(server, "unpacked", lambda program: program)
    monkeypatch.setattr(server, "HELLO_S", 0.3)
    shared = SharedParams(3, [np.arange(2.0)], [])
    job = server.ServerConfig(Quorum(2), 2, shared, b"", b"", "token", "127.0.0.1", True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=server._Server(job).accept, args=(listener,), daemon=True).start()
        yield listener
        monkeypatch.setattr(server, "BEAT_S", 60.0)  # the thread that lets in, for good


def greeted(door: socket.socket, answer: bytes = b"") -> bytes:
    """All bytes from the server to a client with this answer to its challenge."""
    with door:
        door.settimeout(10.0)
        receive_header(door)
        received = b""
        with suppress(ConnectionError):  # it may close before it has read all of the answer
            door.sendall(answer)
            while data := door.recv(1 << 16):
                received += data
        return received


def test_strangers_at_the_server_get_no_answer_and_leave_no_traceback(listener, capfd):
    hello = b'{"proof": "%s", "island": 0}\n'
    lines = [
        b"",
        b"5\n",
        b"null\n",
        b"[" * 60_000 + b"\n",
        hello % b"token",
        b'{"proof": 7}\n',
        b'{"token": "token"}\n',
    ]
    for line in lines:  # the first one is silent
        assert greeted(socket.create_connection(listener.getsockname()), line) == b""
    with socket.create_connection(listener.getsockname()) as door:
        door.settimeout(10.0)
        proof = signature("token", receive_header(door)["challenge"])
        send_message(door, {"proof": proof, "island": 0})
        door.settimeout(1.0)
        with pytest.raises(TimeoutError):  # an island that knows the token is not shut out
            door.recv(1)
    assert "Traceback" not in capfd.readouterr().err


def test_an_island_of_another_secret_is_a_stranger(listener, monkeypatch):
    door = socket.create_connection(listener.getsockname())
    challenge = receive_header(door)["challenge"]
    monkeypatch.setenv("FDDP_SECRET", "guessed")
    proof = signature("token", challenge)
    monkeypatch.delenv("FDDP_SECRET")
    send_message(door, {"proof": proof, "island": 0})
    assert door.recv(1) == b""
    door.close()
