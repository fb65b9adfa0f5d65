"""If ranks die, are stopped, spin or leave early, all end, and every rank names rank, place and
reason."""

import fcntl
import json
import os
import re
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from processes import case, launch, written

from fddp.runtime.watching import flight_text as flight
from fddp.runtime.watching import read_flights
from fddp.runtime.watching.watcher.links import wait_readable
from fddp.runtime.watching.watcher.main import STOP_S, Stop, stop_of
from fddp.runtime.watching.watcher.rank import WatchedRank
from fddp.runtime.watching.watcher.verdicts import (
    AFTER_S,
    PATIENCE,
    Verdict,
    judge,
    judge_alone,
    unheard,
)

### Conclusions of the watchers

GOING = {
    "steps": 52,
    "before": 0,
    "calls": 55,
    "messages": 104,
    "doing": "between steps",
    "sending": "",
    "place": "",
    "still": 0.1,
    "lifeless": 0.2,
    "typical": 0.01,
    "together": False,
    "stopped": False,
    "gone": None,
    "done": False,
    "heard": 100.0,
}
NOW = 100.0


def rank(number: int, **fields: Any) -> dict[str, Any]:
    return GOING | {"rank": number} | fields


def waiting(number: int, still: float) -> dict[str, Any]:
    position = {
        "steps": 53,
        "calls": 56,
        "messages": 105,
        "doing": "update 1",
        "sending": "bucket 2",
    }
    return rank(number, together=True, still=still, **position)


def conclude(
    *ranks: dict[str, Any], stall_s: float | None = 10.0, time: float = NOW
) -> Verdict | None:
    return judge({record["rank"]: record for record in ranks}, time, stall_s)


def test_ranks_that_move_or_are_all_between_steps_are_well():
    assert conclude(waiting(0, 0.5), waiting(1, 0.1)) is None
    assert conclude(rank(0, still=1e6), rank(1, still=1e6)) is None  # both evaluate
    assert conclude(waiting(0, 1e6), rank(1, still=9.0)) is None  # not for so long


def test_the_first_step_may_take_any_time():
    for stall_s in (10.0, None):
        assert (
            conclude(waiting(0, 1e6) | {"steps": 1}, rank(1, steps=0, still=1e6), stall_s=stall_s)
            is None
        )


@pytest.mark.parametrize("steps", [2, 3])
def test_while_nobody_knows_how_long_a_step_takes_a_stall_is_twenty_times_as_long(steps: int):
    stuck = {"lifeless": 1e4, "steps": steps}
    verdict_after = lambda still, **fields: conclude(  # noqa: E731
        waiting(0, still) | {"steps": steps, "typical": 0.0},
        waiting(1, still) | stuck | fields,
        stall_s=None,
    )
    least = PATIENCE * 30.0
    assert verdict_after(least - 1) is None
    first = verdict_after(least + 1)
    second = verdict_after(2 * least + 1)
    assert first is not None and second is not None
    assert first.words.startswith(
        f"nothing has moved for 600 s: rank 1 does not run Python in step {steps}"
    )
    assert (first.end, second.end) == (False, True)
    compiles = verdict_after(least + 1, doing="step", messages=104, lifeless=0.1)
    assert (
        compiles is not None
        and not compiles.end
        and "If this goes on for 1200 s all ranks end" in compiles.words
    )
    lost = verdict_after(61.0, heard=NOW - 61.0)  # its watcher is heard of in any step
    assert lost is not None and lost.end and "rank 1 has not been heard of" in lost.words


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_rank_that_is_stopped_before_its_first_steps_is_named_as_later(steps: int):
    """Inside a checkpoint's restore, for example, where the others wait in a gather."""
    verdict_after = lambda still: conclude(  # noqa: E731
        waiting(0, still) | {"steps": steps, "doing": "all_gather", "typical": 0.0},
        rank(1, steps=steps, still=still, stopped=True, lifeless=still),
        stall_s=None,
    )
    assert verdict_after(29.0) is None
    first = verdict_after(31.0)
    second = verdict_after(61.0)
    assert first is not None and second is not None
    assert first.words.startswith("nothing has moved for 30 s: rank 1 is stopped ")
    assert f"rank 0 waits in all_gather after step {steps}" in first.words
    assert (first.end, second.end) == (False, True)


def test_a_call_that_one_rank_makes_alone_is_named():
    verdict = conclude(
        waiting(0, 31.0) | {"steps": 4, "doing": "all_gather of Checkpoints.save"},
        waiting(1, 31.0) | {"steps": 5, "messages": 9},
        stall_s=5.0,
    )
    assert verdict is not None
    words = "in all_gather of Checkpoints.save, which all ranks must call, after step 4"
    assert words in verdict.words and "fddp.alive" not in verdict.words


def test_a_host_that_is_lost_in_the_first_step_is_named_as_later():
    verdict_after = lambda still, heard: conclude(  # noqa: E731
        waiting(0, still) | {"steps": 1}, rank(1, steps=0, still=0.1, heard=NOW - heard)
    )
    assert verdict_after(11.0, 9.0) is None  # it may compile, and its watcher have stumbled
    first = verdict_after(11.0, 11.0)
    second = verdict_after(21.0, 21.0)
    assert first is not None and second is not None
    assert "rank 1 has not been heard of, before its first step" in first.words
    assert (first.end, second.end) == (False, True)


def test_a_rank_never_heard_of_is_named_once_the_others_wait_in_a_later_step():
    never = unheard(1, rank(0), NOW - 11.0, met=False)
    assert conclude(waiting(0, 11.0) | {"steps": 1}, never) is None  # it may compile
    verdict = conclude(waiting(0, 11.0), never)
    assert verdict is not None and "rank 1 has not been heard of" in verdict.words


def test_who_no_longer_hears_of_rank_0_judges_alone_but_in_the_first_step():
    waiting_report = waiting(1, 21.0)
    for report, met in (
        (waiting_report, True),
        (waiting_report, False),
        (waiting_report | {"steps": 1}, True),
    ):
        verdict = judge_alone(report, NOW - 21.0, NOW, 10.0, met=met)
        assert verdict is not None and verdict.end
        assert "rank 0 has not been heard of, since it fell silent" in verdict.words
    assert judge_alone(waiting_report | {"steps": 1}, NOW - 21.0, NOW, 10.0, met=False) is None


def test_a_rank_that_lives_between_steps_is_named_at_once_and_ended_late():
    verdict = conclude(waiting(0, 11.0), rank(1, still=11.0))
    assert verdict is not None and not verdict.end
    assert verdict.words.startswith(
        "nothing has moved for 10 s: rank 1 is between steps 52 and 53; rank 0 waits in step 53 "
        "for bucket 2. If this "
        "goes on for 200 s all ranks end; call fddp.alive()"
    )
    patience_s = PATIENCE * 10.0 + 1
    ended_verdict = conclude(waiting(0, patience_s), rank(1, still=patience_s))
    assert ended_verdict is not None and ended_verdict.end and "for 200 s" in ended_verdict.words


def test_a_rank_that_waits_in_another_call_after_one_step_is_named_too():
    early = rank(0, steps=1, still=2.0, together=True, doing="broadcast", calls=5)
    verdict = conclude(early, waiting(1, 0.6) | {"steps": 2, "calls": 4, "doing": ""}, stall_s=0.5)
    assert verdict is not None
    assert verdict.words == (
        "nothing has moved for 0.5 s: rank 1 is in step 2 for bucket 2; rank 0 waits in broadcast "
        "after step 1. The ranks are in different calls: each rank calls step, save, evaluate and, "
        "with shard='state', no_sync equally often and in the same order"
    )


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [("gather 0", "tail", True), ("gather 0", "", False), ("bucket 1", "tail", False)],
)
def test_ranks_of_which_one_gathers_parameters_are_in_different_calls(
    first: str, second: str, differ: bool
):
    verdict = conclude(
        waiting(0, 11.0) | {"sending": first}, waiting(1, 11.0) | {"sending": second}
    )
    assert verdict is not None
    assert ("no_sync equally often" in verdict.words) == differ


def test_a_rank_that_compiles_a_step_has_as_long_as_one_that_evaluates():
    compiles = waiting(1, 30.0) | {"doing": "step", "sending": "", "messages": 104}
    verdict = conclude(waiting(0, 30.0), compiles)
    assert verdict is not None and not verdict.end
    launched = conclude(waiting(0, 30.0), compiles | {"doing": "launched"})
    assert launched is not None and launched.end


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stopped": True, "lifeless": 11.0}, "rank 1 is stopped between steps 52 and 53"),
        ({"lifeless": 11.0}, "rank 1 does not run Python between steps 52 and 53 (a debugger"),
        (
            {"heard": 89.0},
            "rank 1 has not been heard of, between steps 52 and 53 (its host, or the network)",
        ),
    ],
)
def test_a_rank_without_a_sign_of_life_is_ended_after_two_stalls(
    fields: dict[str, Any], words: str
):
    first, second = (
        conclude(waiting(0, still), rank(1, still=still, **fields)) for still in (11.0, 21.0)
    )
    assert first is not None and second is not None
    assert words in first.words and words in second.words
    assert (first.end, second.end) == (False, True)


def test_ranks_of_a_smaller_group_wait_for_a_slow_rank_and_not_for_a_lost_one():
    waits = {"doing": "update", "sending": "pseudo-gradient", "still": 21.0}
    for slow in ({"still": 21.0}, {"stopped": True, "lifeless": 21.0, "still": 21.0}):
        assert conclude(rank(0, **waits), rank(1, **waits), rank(2, **slow)) is None
    lost = {"heard": NOW - 21.0}
    assert conclude(rank(0, **waits), rank(1, still=0.5), rank(2, **lost)) is None
    verdict = conclude(rank(0, **waits), rank(1, **waits), rank(2, **lost))
    assert verdict is not None and verdict.end
    assert (
        "rank 2 has not been heard of" in verdict.words
        and "ranks 0, 1 wait between" in verdict.words
    )


def test_steps_are_those_of_the_training_and_what_a_rank_does_between_them_is_told():
    saving = rank(1, still=11.0, before=300, doing="saving step 352")
    verdict = conclude(waiting(0, 11.0) | {"before": 300}, saving)
    assert verdict is not None and not verdict.end
    assert (
        "rank 1 is between steps 352 and 353, saving step 352; rank 0 waits in step 353"
        in verdict.words
    )


def test_without_a_number_a_stall_is_30_seconds_or_ten_steps():
    verdict_after = lambda still, typical: conclude(  # noqa: E731
        waiting(0, still) | {"typical": typical}, rank(1, still=still), stall_s=None
    )
    assert verdict_after(29.0, 0.01) is None and verdict_after(31.0, 0.01) is not None
    assert verdict_after(59.0, 6.0) is None and verdict_after(61.0, 6.0) is not None


def test_a_message_in_which_all_ranks_wait_is_told():
    verdict = conclude(waiting(0, 21.0), waiting(1, 21.0))
    assert verdict is not None and verdict.end
    assert "rank 0 is in step 53 for bucket 2; rank 1 is in step 53 for bucket 2" in verdict.words


def test_of_ranks_that_died_one_after_the_other_the_first_is_named():
    then = NOW - 2 * AFTER_S
    verdict = conclude(
        rank(0, gone=then + 0.01), rank(1, gone=then, steps=53, together=True, doing="stage 1")
    )
    assert verdict == Verdict("rank 1 died in step 53, stage 1", True)
    assert conclude(rank(0), rank(1, gone=NOW)) is None  # other deaths are not known yet


def test_of_ranks_that_mpiexec_killed_at_once_the_one_that_did_not_wait_is_named():
    then = NOW - 2 * AFTER_S
    waits = {"together": True, "steps": 53, "sending": "bucket 0 (b)"}
    verdict = conclude(
        rank(0, gone=then, **waits), rank(1, gone=then + 0.01), rank(2, gone=then, **waits)
    )
    assert verdict == Verdict("rank 1 died between steps 52 and 53", True)
    later = conclude(rank(0, gone=then, **waits), rank(1, gone=then + 0.2))
    assert later == Verdict("rank 0 died in step 53 for bucket 0 (b)", True)


def test_who_dies_because_another_failed_is_not_the_cause():
    then = NOW - 2 * AFTER_S
    verdict = conclude(rank(0, gone=then), rank(1, doing="failed", done=True, gone=then + 0.1))
    assert verdict == Verdict("rank 1 failed", True)


def test_a_rank_that_failed_and_is_gone_does_not_keep_the_others_waiting():
    assert (
        conclude(waiting(0, 0.5), rank(1, doing="failed", done=True)) is None
    )  # it still tells why
    verdict = conclude(waiting(0, 0.5), rank(1, doing="failed", done=True, gone=NOW))
    assert verdict == Verdict(
        "rank 1 failed after 52 steps, and rank 0 waits in step 53 for bucket 2", True
    )


def test_a_rank_with_an_error_of_its_connections_has_waited_for_the_one_that_left():
    """A call that fails does not count, and a death may not be known yet."""
    lost = rank(0, doing="after an error", still=2 * AFTER_S)
    says = "rank 1 {} after 52 steps, and rank 0 is between steps 52 and 53, after an error"
    verdict = conclude(lost, rank(1, doing="left by SystemExit", done=True))
    assert verdict == Verdict(says.format("left by SystemExit"), True)
    over = rank(1, doing="finished", done=True)
    advice = ": give each rank equally many batches, or use fddp.join"
    assert conclude(lost, over) == Verdict(says.format("finished") + advice, True)
    assert conclude(lost | {"still": AFTER_S / 2}, over) is None
    assert conclude(lost, rank(1)) is None and conclude(lost, over | {"calls": 56}) is None


def test_a_rank_that_has_finished_does_not_wait_for_one_that_failed():
    over = rank(0, doing="finished", done=True)
    assert conclude(over, rank(1, doing="failed", done=True)) is None  # it still tells why
    assert conclude(over | {"gone": NOW}, rank(1, doing="failed", done=True, gone=NOW)) is None
    verdict = conclude(over, rank(1, doing="failed", done=True, gone=NOW))
    assert verdict == Verdict(
        "rank 1 failed after 52 steps, and rank 0 has finished and waits for it", True
    )


def test_ranks_that_have_finished_wait_for_a_lost_rank_no_longer_than_in_a_step():
    over = rank(0, doing="finished", done=True, still=1e4)
    work = {"still": 1e4, "place": "evaluate (train.py:9)"}
    waits = ", and rank 0 has finished and waits for it"
    place = "between steps 52 and 53, evaluate (train.py:9)"
    assert conclude(over, rank(1, **work)) is None
    assert conclude(over, rank(1, heard=NOW - 9.0, **work)) is None
    for so_far, end in ((11.0, False), (21.0, True)):
        lost = conclude(over, rank(1, heard=NOW - so_far, **work))
        assert lost == Verdict(
            f"rank 1 has not been heard of, {place} (its host, or the network){waits}", end
        )
        stopped = conclude(over, rank(1, stopped=True, lifeless=so_far, **work))
        assert stopped == Verdict(f"rank 1 is stopped {place}{waits}", end)
        verdict = conclude(
            over, rank(1, lifeless=so_far, **work)
        )  # XLA may hold the interpreter for long
        assert verdict is not None and not verdict.end


@pytest.mark.parametrize("gone", [None, NOW - 1e4])
@pytest.mark.parametrize("doing", ["finished", "left by sys.exit(3)", "failed"])
def test_a_rank_that_is_stopped_while_it_exits_is_ended_after_two_stalls(
    doing: str, gone: float | None
):
    other = rank(0, doing="finished", done=True, gone=gone)
    report = rank(1, doing=doing, done=True, stopped=True)
    assert conclude(other, report | {"lifeless": 19.0}) is None
    words = f"rank 1 {doing} after 52 steps, and its process is stopped"
    assert conclude(other, report | {"lifeless": 21.0}) == Verdict(words, True)
    # An exit handler of native code may take any time.
    assert conclude(other, report | {"lifeless": 1e4, "stopped": False}) is None


def test_who_has_finished_waits_from_then_on_for_a_rank_long_unheard():
    report_after = lambda still: rank(3, doing="finished", done=True, still=still)  # noqa: E731
    verdict_after = lambda still: judge_alone(report_after(still), NOW - 1e4, NOW, 10.0)  # noqa: E731
    assert verdict_after(1.0) is None and verdict_after(9.0) is None
    first = verdict_after(11.0)
    second = verdict_after(21.0)
    assert first is not None and second is not None
    assert (
        "rank 0 has not been heard of" in first.words
        and "rank 3 has finished and waits for it" in first.words
    )
    assert (first.end, second.end) == (False, True)


def test_a_rank_that_finished_while_another_waits_is_told_what_to_do():
    verdict = conclude(waiting(0, 0.5), rank(1, doing="finished", done=True))
    assert verdict == Verdict(
        "rank 1 finished after 52 steps, and rank 0 waits in step 53 for bucket 2: give each rank "
        "equally many "
        "batches, or use fddp.join",
        True,
    )
    assert (
        conclude(waiting(0, 0.5), rank(1, doing="finished", done=True, steps=53, calls=56)) is None
    )  # it took part in that step


def test_a_rank_that_finished_while_all_others_wait_in_smaller_groups_ends_them():
    finished = rank(1, doing="finished", done=True)
    waits = {"doing": "step", "sending": "bucket 2"}
    assert conclude(rank(0, still=9.0, **waits), finished) is None
    assert conclude(rank(0, still=11.0, **waits), finished, rank(2, still=11.0)) is None
    verdict = conclude(rank(0, still=11.0, **waits), finished)
    assert verdict == Verdict(
        "rank 0 waits for bucket 2 of a smaller group, and the finished ranks (1) send nothing: "
        "give each rank of the group equally many batches",
        True,
    )


def test_a_rank_that_is_in_no_task_is_told_by_the_line_of_its_script():
    verdict = conclude(waiting(0, 11.0), rank(1, still=11.0, place="load (train.py:34)"))
    assert (
        verdict is not None
        and "rank 1 is between steps 52 and 53, load (train.py:34); rank 0 waits" in verdict.words
    )


### How they hear each other


@contextmanager
def files(most: int) -> Iterator[None]:
    """Limits the number of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_watcher_of_more_than_1024_ranks_hears_the_last():
    watcher_end, rank_end = socket.socketpair()
    with (
        watcher_end,
        rank_end,
        files(2048),
        socket.socket(fileno=fcntl.fcntl(watcher_end, fcntl.F_DUPFD, 2000)) as last,
    ):
        assert wait_readable([last], 0.0) == set()
        rank_end.sendall(b"{}\n")
        assert wait_readable([last], 10.0) == {last}


### Real ranks

TOLD_S = 60.0
MPI = ("mpi", 3)
GLOO = ("gloo", 2)


def on_ranks(
    names: str,
    *quick: tuple[Any, ...],
    slow: Sequence[tuple[Any, ...]] = (),
) -> pytest.MarkDecorator:
    """Some faults by default; the others, and each on the other backend, in the tier `slow`."""
    other_backend = [(GLOO if job == MPI else MPI, *fault) for job, *fault in (*quick, *slow)]
    slow_faults = [fault for fault in dict.fromkeys((*slow, *other_backend)) if fault not in quick]
    return pytest.mark.parametrize(
        names,
        [*(case(*fault) for fault in quick), *(case(*fault, slow=True) for fault in slow_faults)],
    )


def broken(folder: Path, backend: str, size: int, how: str) -> tuple[str, list[str]]:
    """The outputs of all ranks of a failed job, and their lines with the reason."""
    env: Any = {"FDDP_FLIGHT_DIR": str(folder / "flight")}
    outcome = launch(backend, size, "faults.py", how, folder=folder, **env)
    at_exit = how == "stop_at_exit"
    assert outcome.ended and outcome.codes[-at_exit] != 0
    assert 0 not in outcome.codes or at_exit or how in ("early", "early_alone", "exit"), (
        "the rank ends as if all were well"
    )
    # Watchers outlive their ranks; the last word is that of rank 0's.
    until = time.monotonic() + TOLD_S
    while (
        "python -m fddp flight" not in (text := "\n".join(written(folder, size)))
        and time.monotonic() < until
    ):
        time.sleep(0.1)
    print(text)
    return text, re.findall(r"^fddp: (.*)$", text, re.MULTILINE)


# Below, a rank of MPI leaves by `os._exit`, and rank 0 of Gloo is killed.
@on_ranks("backend, size, how", (MPI, "kill"), (GLOO, "term"), slow=[(MPI, "exit")])
def test_a_rank_that_dies_is_named_by_the_others_and_nobody_else_is(
    backend: str, size: int, how: str, tmp_path: Path
):
    text, lines = broken(tmp_path, backend, size, how)
    last = size - 1
    assert f"rank 0 of {size}: rank {last} died between steps 20 and 21." in lines
    assert not any(f"rank {rank} died" in line for line in lines for rank in range(last))
    assert "Traceback" not in text


@pytest.mark.ranks
def test_a_rank_that_leaves_is_no_success_to_mpiexec_though_all_write_to_files(tmp_path: Path):
    env: Any = {"OWN_FILES": str(tmp_path)}
    outcome = launch("mpi", 3, "faults.py", "exit", folder=tmp_path, **env)
    text = "\n".join(path.read_text() for path in sorted(tmp_path.glob("own.*")))
    print(text)
    assert outcome.codes == (1,)
    assert "rank 0 of 3: rank 2 died between steps 20 and 21." in text
    assert "rank 0 died" not in text and "rank 1 died" not in text and "Traceback" not in text
    assert "python -m fddp flight" in text  # the last word, before mpiexec has ended


def test_the_watcher_of_rank_0_ends_mpiexec_and_the_others_hold_it_until_then():
    mpiexec, link_end = socket.socketpair()
    link, first = socket.socketpair()
    job = {"memory": -1, "parent": os.getppid(), "pmi_fd": link_end.fileno()}
    leave_last = WatchedRank(job).leave_last
    with mpiexec, link_end, link, first:
        links = {link: bytearray()}
        holds = Thread(target=leave_last, args=(links, 60.0), kwargs={"abort": False})
        holds.start()
        assert first.recv(1) == b""  # rank 0's watcher does not wait for this one
        assert holds.is_alive()
        leave_last({}, 60.0, abort=True)
        assert mpiexec.recv(100) == b"cmd=abort exitcode=1\n"
        mpiexec.close()
        holds.join(60.0)
        assert not holds.is_alive()


@on_ranks(
    "backend, size, how, says", (MPI, "stop", "is stopped"), (GLOO, "hold", "does not run Python")
)
def test_a_rank_that_is_stuck_is_named_and_ended(
    backend: str, size: int, how: str, says: str, tmp_path: Path
):
    (tmp_path / "flight").mkdir()
    earlier = {
        "rank": 7,
        "size": 8,
        "why": "",
        "steps": 0,
        "doing": "",
        "messages": [],
        "began": 1.0,
    }
    (tmp_path / "flight" / "rank_7.json").write_text(json.dumps(earlier))
    text, lines = broken(tmp_path, backend, size, how)
    pattern = (
        rf"rank 0 of {size}: nothing has moved for 2 s: rank {size - 1} {says} between steps 20 "
        rf"and 21"
    )
    pattern += r".*wait.* in step 21 for bucket 0"
    assert any(re.match(pattern, line) for line in lines)
    assert any(re.match(pattern.replace("for 2 s", "for 4 s"), line) for line in lines)
    assert (
        f"first difference, in message 40: rank 0 bucket 0, 24 bytes; rank {size - 1} not sent"
        in flight(read_flights([tmp_path / "flight"])).replace(
            "; rank 1 bucket 0, 24 bytes" * (size == 3), ""
        )
    )
    assert "Traceback" not in text


@on_ranks("backend, size", (MPI,))
def test_a_rank_that_is_stopped_while_it_exits_is_ended(backend: str, size: int, tmp_path: Path):
    _, lines = broken(tmp_path, backend, size, "stop_at_exit")
    why = f"rank {size - 1} finished after 20 steps, and its process is stopped."
    assert f"rank {size - 1} of {size}: {why}" in lines


@on_ranks("backend, size", (MPI,), slow=[(GLOO,)])
def test_a_rank_that_returns_early_ends_the_others(backend: str, size: int, tmp_path: Path):
    _, lines = broken(tmp_path, backend, size, "early")
    (line,) = [line for line in lines if line.startswith("rank 0")]
    assert f"rank {size - 1} finished after 20 steps, and rank 0 waits in step 21" in line
    assert line.endswith("give each rank equally many batches, or use fddp.join.")


@pytest.mark.parametrize("backend, size", [case(MPI)])
def test_a_rank_that_returns_early_ends_the_others_of_its_subgroup(
    backend: str, size: int, tmp_path: Path
):
    _, lines = broken(tmp_path, backend, size, "early_alone")
    assert any("rank 0 waits for bucket" in line for line in lines), lines


@pytest.mark.parametrize("backend, size", [case(GLOO), case(MPI)])
def test_a_training_that_ends_well_ends_without_a_word(backend: str, size: int, tmp_path: Path):
    """The last step is still under way when rank 0's script ends, and the other ranks wait for it;
    a handler keeps the process for a while."""
    outcome = launch(backend, size, "ends_well.py", folder=tmp_path)
    assert outcome.succeeded
    time.sleep(AFTER_S)
    assert written(tmp_path, size) == ("trained\n",) * size


@on_ranks("backend, size", slow=[(MPI,), (GLOO,)])
def test_a_rank_that_raises_leaves_a_record_of_its_messages(
    backend: str, size: int, tmp_path: Path
):
    broken(tmp_path, backend, size, "raise")
    assert (tmp_path / "flight" / f"rank_{size - 1}.json").exists()


@on_ranks("backend, size, how", (GLOO, "at_once"), (GLOO, "raise_exit"))
def test_a_rank_that_leaves_by_sys_exit_ends_the_others_and_has_not_merely_finished(
    backend: str, size: int, how: str, tmp_path: Path
):
    """The same before its first step, when the others compare themselves with it."""
    _, lines = broken(tmp_path, backend, size, how)
    end = {"at_once": "left by sys.exit(3) after 0", "raise_exit": "left by SystemExit after 20"}
    (line, *_) = (line for line in lines if line.startswith(f"rank 0 of {size}: rank {size - 1}"))
    assert line.startswith(f"rank 0 of {size}: rank {size - 1} {end[how]} steps, and")
    assert "equally many batches" not in line


@pytest.mark.parametrize(
    "backend, size, how",
    [case(GLOO, "late"), case(GLOO, "late_0", slow=True), case(MPI, "late", slow=True)],
)
def test_a_rank_that_raises_after_the_others_have_finished_ends_them(
    backend: str, size: int, how: str, tmp_path: Path
):
    text, lines = broken(tmp_path, backend, size, how)
    wrong, over = (0, size - 1) if how == "late_0" else (size - 1, 0)
    assert f"rank {wrong} of {size} failed:" in lines and "broken on purpose" in text
    if backend == "gloo":  # MPI ends them by itself
        waits = (
            f"rank {wrong} failed after 20 steps, and rank {over} has finished and waits for it."
        )
        assert f"rank {over} of {size}: {waits}" in lines


@pytest.mark.ranks
def test_the_death_of_rank_0_is_the_last_that_the_others_tell(tmp_path: Path):
    text, _ = broken(tmp_path, "gloo", 2, "kill_0")
    assert "fddp: rank 1 of 2: rank 0 died between steps 20 and 21." in text.splitlines()[-3:]
    # JAX's coordination service outlives rank 0, and no rank prints anything else.
    assert [
        line
        for line in text.splitlines()
        if not line.startswith(("fddp: ", "---", "[Gloo]")) and line
    ] == []


@pytest.mark.quick("gloo-2")
@on_ranks("backend, size", (MPI,), (GLOO,))
def test_a_rank_that_is_preempted_stops_all_after_the_same_step(
    backend: str, size: int, tmp_path: Path
):
    outcome = launch(backend, size, "faults.py", "preempt", folder=tmp_path)
    assert outcome.succeeded
    first, *other_outputs = outcome.outputs
    assert re.fullmatch(r"saved \d+\n", first) and int(first.split()[1]) > 20
    assert set(other_outputs) == {first}


### Where all stop


def going(
    asks: int, agreed: int = 0, *, announced: bool = False, between_s: float = 0.1
) -> dict[str, Any]:
    return {
        "asks": asks,
        "agreed": agreed,
        "told": announced,
        "between_s": between_s,
        "done": False,
    }


def test_nobody_stops_unless_a_rank_was_told_to():
    assert stop_of({0: going(5), 1: going(6)}, Stop(0, False)) == Stop(0, False)


def test_a_question_is_proposed_that_no_rank_has_reached_and_settled_when_all_agree():
    first = stop_of({0: going(5), 1: going(6, announced=True)}, Stop(0, False))
    assert first == Stop(6 + 1 + int(STOP_S / 0.1), False)
    assert (
        stop_of({0: going(7, first.step), 1: going(7, announced=True)}, first) == first
    )  # a rank has not answered yet
    both = {0: going(7, first.step), 1: going(8, first.step, announced=True)}
    assert stop_of(both, first) == Stop(first.step, True)
    assert stop_of({}, Stop(first.step, True)) == Stop(first.step, True)


def test_who_has_passed_a_question_gets_another():
    late_requests = {0: going(30, -22), 1: going(22, 22, announced=True)}
    second_stop = stop_of(late_requests, Stop(22, False))
    assert second_stop.step > 30 and not second_stop.settled
