"""JAX's coordination service next to rank 0: it ends with its last client, and reports why it does
not start."""

import os
import socket
import time

import jax
import pytest
from processes import free_port

from fddp.runtime import join_service
from fddp.runtime.join_service import LOOSE, start_coordinator

WAIT_S = 300.0  # a last resort


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_it_listens_until_all_who_hold_it_have_let_go():
    port = free_port()
    bind, descriptors = start_coordinator(f"127.0.0.1:{port}", 0, 2)
    assert bind == LOOSE and listens(port)
    watcher = os.dup(descriptors[0])  # another holder
    os.close(descriptors[0])
    time.sleep(0.2)
    assert listens(port)
    os.close(watcher)
    until = time.monotonic() + WAIT_S
    while listens(port) and time.monotonic() < until:
        time.sleep(0.05)
    assert not listens(port)


def test_only_rank_0_starts_one():
    assert start_coordinator(f"127.0.0.1:{free_port()}", 1, 2) == (LOOSE, ())


def test_a_service_that_does_not_start_says_why():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(
            RuntimeError, match=rf"coordination service did not start at 127.0.0.1:{port}: .+"
        ):
            start_coordinator(f"127.0.0.1:{port}", 0, 2)


def test_a_rank_at_its_end_waits_for_days_and_leaves_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
):
    waited: list[float] = []

    class Client:
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            waited.append(milliseconds / 86_400_000)
            raise jax.errors.JaxRuntimeError("the service is gone")

    for client in (Client(), None):  # None: the script has called jax.distributed.shutdown
        monkeypatch.setattr(join_service, "coordination_client", lambda client=client: client)
        join_service.wait_for_all()
    assert waited == [7]
