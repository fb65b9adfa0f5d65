"""Ranks meet before anything else starts and report the missing ones; none waits for ever, and all
get the reason."""

import hashlib
import hmac
import resource
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from processes import free_port

from fddp.runtime import rendezvous
from fddp.runtime.rendezvous import Guest, ServiceAddresses, meet_ranks
from fddp.runtime.watching import allow_files


def outcomes(ranks: Sequence[tuple[int, int]], coordinator: str, timeout_s: float) -> list[str]:
    """The result of the rendezvous for each (rank, size): '' if all ranks were present."""

    def outcome(place: tuple[int, int]) -> str:
        try:
            meet_ranks(*place, coordinator, timeout_s)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_that_all_come_go_on_and_leave_the_port_to_others(size):
    coordinator = free_address()
    for _ in range(2):  # the second time as JAX's service, which takes the port over
        assert outcomes([(rank, size) for rank in range(size)], coordinator, 60) == [""] * size


@pytest.mark.steps
def test_who_has_not_come_is_the_same_error_on_all_who_have():
    coordinator = free_address()
    messages = outcomes([(0, 4), (2, 4)], coordinator, 2)
    assert (
        messages
        == [
            f"fddp.init(timeout_s=2) could not join the other ranks at {coordinator}: "
            "ranks 1, 3 of 4 have not come in time."
        ]
        * 2
    )


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_a_rank_that_cannot_join_tells_all_others_why_at_once(failing_rank):
    coordinator = free_address()
    errors = dict[int, str]()

    def come(rank: int) -> None:
        with pytest.raises(RuntimeError) as error:
            meet_ranks(rank, 3, coordinator, 300, "it came too late" * (rank == failing_rank))
        errors[rank] = str(error.value)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(come, range(3)))
    reason = f"rank {failing_rank}: it came too late."
    assert errors == dict.fromkeys(
        range(3),
        f"fddp.init(timeout_s=300) could not join the other ranks at {coordinator}: {reason}",
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_waits_for_nobody_long(rank, monkeypatch):
    monkeypatch.setattr(rendezvous, "TELL_S", 0.5)
    with pytest.raises(RuntimeError, match=f"rank {rank}: it came too late"):
        meet_ranks(rank, 2, free_address(), 1e6, "it came too late")


@pytest.mark.steps
@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("nowhere.invalid", "the name 'nowhere.invalid' does not resolve"),
        ("127.0.0.1", "connection refused, no process listens there yet"),
    ],
)
def test_a_rank_that_cannot_reach_rank_0_says_why(host, reason):
    (message,) = outcomes([(1, 2)], f"{host}:{free_port()}", 1)
    assert message.endswith(f": rank 1 of 2 has not reached rank 0 in time: {reason}.")


@pytest.mark.steps
def test_everyone_says_meanwhile_whom_it_waits_for_and_is_silent_afterwards(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "FIRST_WORD_S", 1.0)
    coordinator = free_address()
    before = threading.active_count()
    outcomes([(0, 3), (1, 3)], coordinator, 3)
    outcomes([(1, 2)], coordinator, 3)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"fddp: rank 0 waits at {coordinator}: rank 2 of 3 has not come",
        f"fddp: rank 1 of 2 waits for rank 0 at {coordinator}: connection refused, no process "
        "listens there yet",
        f"fddp: rank 1 of 3 waits for rank 0 at {coordinator}: it is reachable, and waits for "
        "other ranks",
    ]
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([(0, 2), (1, 3)], "rank 0 says that there are 2 processes, rank 1 that there are 3"),
        ([(0, 3), (1, 3), (1, 3)], "two processes claim to be rank 1"),
        ([(0, 2), (2, 3)], "rank 0 says that there are 2 processes, rank 2 that there are 3"),
    ],
)
def test_processes_that_do_not_belong_together_are_told_apart(ranks, problem):
    messages = outcomes(ranks, free_address(), 60)
    assert messages[0].endswith(f": {problem}.")
    assert messages[1] == messages[0]


def test_a_port_that_is_taken_is_an_error_at_once():
    with socket.create_server(("", 0)) as listener:
        (message,) = outcomes([(0, 2)], f"127.0.0.1:{listener.getsockname()[1]}", 60)
    reason = "rank 0 cannot listen there (Address already in use); set another port on all ranks"
    assert message.endswith(f": {reason}: FDDP_COORDINATOR=host:port.")


def test_strangers_and_ranks_that_leave_again_do_not_count():
    host = "127.0.0.1"
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet_ranks, 0, 3, f"{host}:{port}", 60)
        for call in (b"GET / HTTP/1.1\r\n\r\n", b"", b"fddp: rank 1 of 3\n"):
            stranger = connected(host, port)
            stranger.sendall(call)
            stranger.close()
        assert outcomes([(1, 3), (2, 3)], f"{host}:{port}", 60) == ["", ""]
        first.result()


def test_ranks_of_another_job_do_not_count_and_hear_that_it_is_another():
    coordinator = free_address()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet_ranks, 0, 2, coordinator, 60, job="777.0 of a cluster")
        for job in ("", "777.1"):
            with pytest.raises(
                RuntimeError, match="in time: the process at this address is not rank 0 of this job"
            ):
                meet_ranks(1, 2, coordinator, 2, job=job)
        assert not first.done()
        meet_ranks(1, 2, coordinator, 60, job="777.0 of a cluster")
        first.result()


@pytest.mark.steps
def test_a_server_that_waits_for_a_request_is_named_as_no_rank(monkeypatch):
    monkeypatch.setattr(rendezvous, "ATTEMPT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (message,) = outcomes([(1, 2)], f"127.0.0.1:{silent.getsockname()[1]}", 1)
    assert "in time: the process at this address is not rank 0 of this job" in message


@pytest.mark.steps
def test_rank_0_names_an_address_of_another_host_and_whence_it_has_its_rank(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "FIRST_WORD_S", 0.2)
    origin = "rank 0 of 2 comes from a template"
    with pytest.raises(RuntimeError, match=f"this host[)]: rank 1 .* in time [(]{origin}[)][.]"):
        meet_ranks(0, 2, f"198.51.100.7:{free_port()}", 1, origin=origin)
    (line,) = capsys.readouterr().err.splitlines()
    assert "(not an address of this host): rank 1 of 2 has not come (rank 0 of 2 comes" in line


def connected(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # rank 0 is about to listen
            continue


### Strangers


def calls(coordinator: str, words: str, secret: str = "") -> str:
    """Rank 0's answer to a call that is signed with a secret."""
    host, port = coordinator.rsplit(":", 1)
    return calls_through(connected(host, int(port)), words, secret)


def calls_through(caller: socket.socket, words: str, secret: str = "") -> str:
    with caller, caller.makefile("rb") as stream:
        receive = lambda: stream.read(int.from_bytes(stream.read(2), "big")).decode()  # noqa: E731
        fields = [part.encode() for part in ("rendezvous ", receive(), "mine", words)]
        signed = b"".join(len(part).to_bytes(8, "big") + part for part in fields)
        proof = hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
        for text in ("mine", words, proof):
            caller.sendall(len(text).to_bytes(2, "big") + text.encode())
        _, _, answer = receive(), receive(), receive()
        return answer


@pytest.mark.parametrize("rank", ["7", "0", "2", "9" * 900, "-1"])
def test_a_rank_out_of_range_does_not_count(rank):
    coordinator = free_address()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet_ranks, 0, 2, coordinator, 60)
        assert calls(coordinator, f"rank {rank} of 2 on here") == ""
        meet_ranks(1, 2, coordinator, 60)
        first.result()


def test_who_does_not_know_the_secret_is_no_rank(monkeypatch):
    monkeypatch.setenv("FDDP_SECRET", "swordfish")
    coordinator = free_address()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet_ranks, 0, 2, coordinator, 60)
        for secret in ("", "guessed"):
            assert calls(coordinator, "rank 1 of 2 on here", secret) == ""
        assert not first.done()
        assert "go " in calls(coordinator, "rank 1 of 2 on here", "swordfish")
        first.result()


def answers(*lines: bytes, every_s: float = 0.0) -> tuple[str, float]:
    """Rank 1's report on a service with these answers, after three seconds at most, and its
    duration."""
    with socket.create_server(("127.0.0.1", 0)) as service, ThreadPoolExecutor(1) as threads:
        port = service.getsockname()[1]
        began = time.monotonic()
        rank = threads.submit(outcomes, [(1, 2)], f"127.0.0.1:{port}", 1)
        service.settimeout(0.2)
        doors = []
        while not rank.done():
            try:
                doors.append(service.accept()[0])
                for line in lines:
                    doors[-1].sendall(line)
                    time.sleep(every_s)
            except OSError:
                continue
        for door in doors:
            door.close()
        return rank.result()[0], time.monotonic() - began


@pytest.mark.parametrize(
    ("lines", "every_s"),
    [
        ((b"go\n",), 0.0),
        ((b"stop: \xff\n",), 0.0),
        ((b"f",) * 50, 0.1),
        ((), 0.0),
        ((b"x" * 10_000,), 0.0),
    ],
)
def test_a_service_that_is_not_rank_0_holds_no_rank_longer_than_it_waits(lines, every_s):
    message, seconds = answers(*lines, every_s=every_s)
    assert "rank 1 of 2 has not reached rank 0 in time: " in message
    assert seconds < 1 + 1 + len(lines) * every_s


def test_silent_strangers_are_dropped_before_files_run_out(monkeypatch):
    monkeypatch.setattr(rendezvous, "allow_files", lambda count: None)
    monkeypatch.setattr("fddp.comm.handshake.PROOF_S", 0.5)
    coordinator = free_address()
    host, port = coordinator.rsplit(":", 1)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        first = threads.submit(meet_ranks, 0, 2, coordinator, 60)
        stack.enter_context(connected(host, int(port)))
        callers = [stack.enter_context(socket.socket()) for _ in range(40)]
        most = max(caller.fileno() for caller in callers) + 20
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (most, before[1])
        )  # rank 0 can hold 20 of the 40
        try:
            for caller in callers:
                caller.connect((host, int(port)))
            assert "go " in calls_through(callers[-1], "rank 1 of 2 on here")
            first.result(60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_rank_0_raises_the_number_of_files_that_it_may_open():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
    try:
        for count, most in ((200, 200 + 1024), (2000, 2000 + 1024), (10**9, before[1])):
            allow_files(count)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(most, before[1]), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_a_rank_says_changes_no_terminal():
    coordinator = free_address()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(outcomes, [(0, 2)], coordinator, 10)
        calls(coordinator, "rank 1 of 2 on here: \x1b[2Jgone")
    assert first.result()[0].endswith(": rank 1: ?[2Jgone.")


### Where JAX's service listens


def test_ranks_of_one_host_meet_at_its_loopback_device_whatever_the_host_is_called():
    port = free_port()
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(meet_ranks, rank, 2, f"{socket.gethostname()}:{port}", 60)
            for rank in (0, 1)
        ]
    loopback = f"127.0.0.1:{port}"
    assert [future.result() for future in both] == [
        ServiceAddresses(loopback, loopback, "127.0.0.1"),
        ServiceAddresses(loopback, "", "127.0.0.1"),
    ]


@pytest.mark.parametrize(
    ("addresses", "meeting"),
    [
        (["::ffff:10.0.0.5"] * 2, ServiceAddresses("10.0.0.5:7", "10.0.0.5:7", "10.0.0.5")),
        (["fd00::5"] * 2, ServiceAddresses("[fd00::5]:7", "[fd00::5]:7", "fd00::5")),
        (["10.0.0.5", "10.1.0.5"], ServiceAddresses("127.0.0.1:7", "[::]:7", "10.0.0.5")),
        # A rank on rank 0's host, where the host's name leads to the loopback device.
        (["127.0.1.1", "::ffff:10.0.0.5"], ServiceAddresses("127.0.0.1:7", "[::]:7", "10.0.0.5")),
        (["fe80::5%eth0"] * 2, ServiceAddresses("127.0.0.1:7", "[::]:7")),
    ],
)
def test_service_and_gloo_listen_where_ranks_of_other_hosts_came_in(addresses, meeting):
    guests = {socket.socket(): Guest(1, "another host", address) for address in addresses}
    for guest in guests:
        guest.close()
    assert rendezvous._places(guests, 7) == ("", meeting)


def test_a_rank_of_rank_0s_host_has_its_address_where_others_come_from_elsewhere(monkeypatch):
    monkeypatch.setattr(
        rendezvous, "_places", lambda *_: ("", ServiceAddresses("10.0.0.5:7", "", "10.0.0.5"))
    )
    coordinator = free_address()
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(meet_ranks, rank, 2, coordinator, 60) for rank in (0, 1)]
    # Rank 1 has come in over the loopback device.
    assert both[1].result() == ServiceAddresses(coordinator, "", "10.0.0.5")
