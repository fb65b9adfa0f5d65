"""Ranks meet before anything else starts, and say whom they wait for; nobody waits for ever, and all hear why."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import free_port

from fddp.runtime import rendezvous
from fddp.runtime.rendezvous import meet


def outcomes(ranks: Sequence[tuple[int, int]], coordinator: str, timeout_s: float) -> list[str]:
    """What meeting tells each (rank, size): '' if all have come."""

    def outcome(place: tuple[int, int]) -> str:
        try:
            meet(*place, coordinator, timeout_s)
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))


def here() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_that_all_come_go_on_and_leave_the_port_to_others(size):
    coordinator = here()
    for _ in range(2):  # the second time as JAX's service, which takes the port over
        assert outcomes([(rank, size) for rank in range(size)], coordinator, 60) == [""] * size


@pytest.mark.steps
def test_who_has_not_come_is_the_same_error_on_all_who_have():
    coordinator = here()
    told = outcomes([(0, 4), (2, 4)], coordinator, 2)
    assert (
        told
        == [
            f"fddp.init(timeout_s=2) could not join the others at {coordinator}: ranks 1, 3 of 4 have not come in time."
        ]
        * 2
    )


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_cannot_join_tells_all_others_why_at_once(late):
    coordinator, told = here(), dict[int, str]()

    def come(rank: int) -> None:
        with pytest.raises(RuntimeError) as error:
            meet(rank, 3, coordinator, 300, "it came too late" * (rank == late))
        told[rank] = str(error.value)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(come, range(3)))
    why = f"rank {late}: it came too late."
    assert told == dict.fromkeys(
        range(3), f"fddp.init(timeout_s=300) could not join the others at {coordinator}: {why}"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join_waits_for_nobody_long(rank, monkeypatch):
    monkeypatch.setattr(rendezvous, "TELL_S", 0.5)
    with pytest.raises(RuntimeError, match=f"rank {rank}: it came too late"):
        meet(rank, 2, here(), 1e6, "it came too late")


@pytest.mark.steps
@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("nowhere.invalid", "the name 'nowhere.invalid' does not resolve"),
        ("127.0.0.1", "connection refused, nobody listens there yet"),
    ],
)
def test_a_rank_that_cannot_reach_rank_0_says_why(host, why):
    (told,) = outcomes([(1, 2)], f"{host}:{free_port()}", 1)
    assert told.endswith(f": rank 1 of 2 has not reached rank 0 in time: {why}.")


@pytest.mark.steps
def test_everyone_says_meanwhile_whom_it_waits_for_and_is_silent_afterwards(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "FIRST_WORD_S", 1.0)
    coordinator, before = here(), threading.active_count()
    outcomes([(0, 3), (1, 3)], coordinator, 3)
    outcomes([(1, 2)], coordinator, 3)
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"fddp: rank 0 waits at {coordinator}: rank 2 of 3 has not come",
        f"fddp: rank 1 of 2 waits for rank 0 at {coordinator}: connection refused, nobody listens there yet",
        f"fddp: rank 1 of 3 waits for rank 0 at {coordinator}: it is there, and waits for others",
    ]
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ([(0, 2), (1, 3)], "rank 0 says that there are 2 processes, rank 1 that there are 3"),
        ([(0, 3), (1, 3), (1, 3)], "two processes say that they are rank 1"),
        ([(0, 2), (2, 3)], "rank 0 says that there are 2 processes, rank 2 that there are 3"),
    ],
)
def test_processes_that_do_not_belong_together_are_told_apart(ranks, problem):
    told = outcomes(ranks, here(), 60)
    assert told[0].endswith(f": {problem}.")
    assert told[1] == told[0]


def test_a_port_that_is_taken_is_an_error_at_once():
    with socket.create_server(("", 0)) as taken:
        (told,) = outcomes([(0, 2)], f"127.0.0.1:{taken.getsockname()[1]}", 60)
    why = "rank 0 cannot listen there (Address already in use); name another port on all ranks"
    assert told.endswith(f": {why}: FDDP_COORDINATOR=host:port.")


def test_strangers_and_ranks_that_leave_again_do_not_count():
    host, port = "127.0.0.1", free_port()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet, 0, 3, f"{host}:{port}", 60)
        for call in (b"GET / HTTP/1.1\r\n\r\n", b"", b"fddp: rank 1 of 3\n"):
            stranger = connected(host, port)
            stranger.sendall(call)
            stranger.close()
        assert outcomes([(1, 3), (2, 3)], f"{host}:{port}", 60) == ["", ""]
        first.result()


def test_ranks_of_another_job_do_not_count_and_hear_that_it_is_another():
    coordinator = here()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, 0, 2, coordinator, 60, job="777.0 of a cluster")
        for job in ("", "777.1"):
            with pytest.raises(RuntimeError, match="in time: what answers there is not rank 0 of this job"):
                meet(1, 2, coordinator, 2, job=job)
        assert not first.done()
        meet(1, 2, coordinator, 60, job="777.0 of a cluster")
        first.result()


def connected(host: str, port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # rank 0 is about to listen
            continue
