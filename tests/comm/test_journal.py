"""Claims about what a rank writes down for its watcher: `fddp.comm.journal`."""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import fddp
from fddp.comm.journal import (
    DOING,
    ENDING,
    HEAD,
    HEADS,
    MESSAGE,
    MESSAGES,
    RING,
    SENDING,
    SIZE,
    STOPPING,
    TEXT,
    VERDICT,
    Journal,
)
from fddp.comm.pace import STEPS, Pace, Usual


def head(journal: Journal) -> dict[str, Any]:
    return dict(zip(HEADS, HEAD.unpack_from(journal.memory, 0)))


def text(journal: Journal, place: int) -> str:
    (words,) = TEXT.unpack_from(journal.memory, place)
    return words.rstrip(b"\0").decode()


def test_a_step_of_all_ranks_is_told_apart_from_one_of_some():
    journal = Journal(bytearray(SIZE), 3)
    for processes, together in ((3, True), (2, False)):
        with journal.step(processes):
            journal.say("stage 1")
            assert (head(journal)["together"], text(journal, DOING)) == (together, "stage 1")
        assert (head(journal)["together"], text(journal, DOING)) == (False, "between steps")
    assert (head(journal)["steps"], head(journal)["calls"]) == (2, 1)


def test_the_pace_is_what_three_of_four_steps_take_at_least():
    pace, clock = Pace(), 0.0
    for number in range(1 + STEPS + 1):
        clock += 1.0 if number % 2 else 0.25  # between two steps
        pace.begin(clock)
        clock += 2.0
        pace.end(clock, 1.5, hidden=False)
    assert pace.usual == Usual(typical=2.25, between=0.25, inside=2.0, computing=1.5)


def test_a_pause_is_no_pace_and_the_first_step_which_compiles_neither():
    pace, clock = Pace(), 0.0
    for number in range(60):
        clock += 100.0 if number in (0, 25) else 0.5
        pace.begin(clock)
        clock += 100.0 if number == 0 else 1.0
        pace.end(clock, 100.0 if number == 0 else 0.75, hidden=False)
    assert pace.usual == Usual(typical=1.5, between=0.5, inside=1.0, computing=0.75)


def test_what_lies_between_steps_that_python_does_not_wait_for_is_unknown():
    pace = Pace()
    for number in range(STEPS):
        pace.begin(float(number))
        pace.end(number + 0.125, 0.0, hidden=True)
    assert pace.usual == Usual(typical=1.0, between=0.0, inside=0.125, computing=0.0)


def test_steps_of_some_ranks_tell_nothing_of_the_pace_of_all():
    journal = Journal(bytearray(SIZE), 3)
    for _ in range(STEPS):
        with journal.step(2):
            pass
    assert head(journal)["typical"] == 0.0


def test_batches_that_were_added_are_told_as_of_the_last_two_calls():
    journal = Journal(bytearray(SIZE), 2)
    for added in (2, 0, 1):
        for _ in range(added):
            journal.adds(2)
        journal.adds(1)  # of another group
        with journal.step(2):
            pass
    journal.adds(2)  # not yet sent
    assert (head(journal)["added"], head(journal)["added_before"]) == (3, 2)


@pytest.mark.steps
def test_a_step_of_several_programs_tells_how_long_it_computed(group: Callable[[int], fddp.Group]):
    own = replace(group(2), journal=Journal(bytearray(SIZE)))
    step = fddp.train_step(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.1), group=own, schedule="after")
    state = step.init(jnp.zeros(()))
    for _ in range(STEPS):
        state, _ = step(state, jnp.ones(8))
    told = head(own.journal)
    assert 0 < told["computing"] < told["inside"]
    assert told["typical"] > 0  # of the steps before: it is not comparable with those of the last ones


def test_what_hosts_say_to_each_other_is_a_call_and_no_step():
    journal = Journal(bytearray(SIZE), 2)
    with journal.call("all_gather", 2):
        assert (head(journal)["together"], text(journal, DOING)) == (True, "all_gather")
    assert (head(journal)["steps"], head(journal)["calls"]) == (0, 1)


def test_an_error_ends_a_step_which_then_does_not_count():
    journal = Journal(bytearray(SIZE))
    with pytest.raises(ArithmeticError), journal.step(1):
        raise ArithmeticError
    assert not head(journal)["together"]
    assert (head(journal)["steps"], head(journal)["calls"]) == (0, 0)


def test_the_last_messages_are_kept_with_their_times():
    journal = Journal(bytearray(SIZE))
    for number in range(MESSAGES + 3):
        with journal.message(f"bucket {number}", 8 * number):
            assert text(journal, SENDING) == f"bucket {number}"
    assert text(journal, SENDING) == ""
    rows = [MESSAGE.unpack_from(journal.memory, RING + k * MESSAGE.size) for k in range(MESSAGES)]
    assert sorted(number for number, *_ in rows) == list(range(3, MESSAGES + 3))
    for number, _, begin, end, nbytes, name in rows:
        assert 0 < begin <= end and nbytes == 8 * number
        assert name.rstrip(b"\0").decode() == f"bucket {number}"


def test_messages_of_two_threads_keep_their_own_places():
    journal, entered = Journal(bytearray(SIZE)), threading.Barrier(2)

    def send(name: str) -> None:
        with journal.message(name, 1):
            entered.wait(10)

    threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [MESSAGE.unpack_from(journal.memory, RING + k * MESSAGE.size) for k in range(2)]
    assert {row[-1].rstrip(b"\0") for row in rows} == {b"a", b"b"}
    assert all(end >= begin > 0 for _, _, begin, end, _, _ in rows)


class Later:
    """An array that is on its way."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_a_step_that_was_launched_lasts_until_its_result_is_there():
    journal, result = Journal(bytearray(SIZE)), Later()
    with journal.step(1):
        journal.launched(result)
    journal.live()
    assert head(journal)["together"] and text(journal, DOING) == "launched"
    with journal.step(1):  # Python is a step ahead
        assert text(journal, DOING) == "launched"
    result.ready = True
    journal.live()
    assert not head(journal)["together"] and text(journal, DOING) == "between steps"


def test_a_sign_of_life_tells_what_the_watchers_found():
    journal = Journal(bytearray(SIZE))
    assert not journal.live().end
    VERDICT.pack_into(journal.memory, ENDING, True, b"rank 1 died")
    assert journal.live() == (True, "rank 1 died")
    assert head(journal)["life"] == 2


def test_another_process_never_sees_a_half_written_journal():
    """It would take a rank that has just begun a step for one that has begun none, and has not moved since the boot."""
    file = os.memfd_create("journal")
    os.ftruncate(file, SIZE)
    memory = mmap(file, SIZE)
    journal = Journal(memory)
    with journal.step(1):
        pass
    read = (
        f"import mmap, struct, sys; memory = mmap.mmap({file}, {SIZE}); head = struct.Struct({HEAD.format!r})\n"
        "print('reads', flush=True)\n"
        f"for _ in range(1_000_000): assert head.unpack_from(memory, 0)[{HEADS.index('steps')}] == 1\n"
    )
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", read], pass_fds=[file], **pipes) as reader:
        assert reader.stdout and reader.stdout.readline() == "reads\n"
        while reader.poll() is None:
            journal.say("stage 1")
        assert reader.stderr and reader.stderr.read() == ""
    os.close(file)


def test_long_names_are_cut_and_nothing_else_is_written_over():
    journal = Journal(bytearray(SIZE))
    journal.say("ü" * 100)
    assert struct.unpack_from("<Q", journal.memory, SENDING) == (0,)


def test_a_process_alone_stops_when_it_is_told_to():
    journal = Journal(bytearray(SIZE))
    assert not journal.stops()
    journal.ask_to_stop()
    assert journal.stops()


def test_ranks_stop_at_the_question_that_all_agreed_to():
    journal = Journal(bytearray(SIZE), 2)

    def propose(question: int, settled: bool) -> None:
        struct.pack_into("<q?", journal.memory, STOPPING + 25, question, settled)

    def agreed() -> int:
        return struct.unpack_from("<q", journal.memory, STOPPING + 17)[0]

    assert not journal.stops()
    propose(1, settled=False)  # too late: this is the second question
    assert not journal.stops() and agreed() == -1
    propose(4, settled=False)
    assert not journal.stops() and agreed() == 4
    threading.Timer(0.1, propose, (4, True)).start()
    assert journal.stops()  # it has waited for the others
    assert not journal.stops()


def test_a_training_that_goes_on_counts_from_where_it_was_saved():
    journal = Journal(bytearray(SIZE))
    journal.goes_on(300)
    assert head(journal)["before"] == 300
    for _ in range(4):
        with journal.step(1):
            pass
    journal.goes_on(2)  # from an older checkpoint, in the same process
    assert head(journal)["before"] + head(journal)["steps"] == 2


class OnItsWay:
    """What a step will have made; over when it is told so."""

    over = False

    def is_ready(self) -> bool:
        return self.over


@pytest.mark.parametrize("end", ["finished", "failed", "left the world"])
def test_a_script_that_has_ended_stays_so_while_its_last_step_is_under_way(end: str):
    journal, result = Journal(bytearray(SIZE), 2), OnItsWay()
    with journal.step(2):
        journal.launched(result)
    journal.say(end)
    journal.live()
    assert (head(journal)["together"], text(journal, DOING)) == (True, end)
    result.over = True
    journal.live()
    assert (head(journal)["together"], text(journal, DOING)) == (False, end)
    with journal.call("all_gather", 2):  # by a handler at Python's exit
        assert text(journal, DOING) == end
    journal.say("finished")
    assert text(journal, DOING) == end
