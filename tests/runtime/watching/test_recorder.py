"""The journal that a rank writes for its watcher: `fddp.runtime.watching.recorder`."""

import os
import subprocess
import sys
import threading
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from fddp.runtime.watching import recorder as recorder_module
from fddp.runtime.watching.recorder import STEPS, Recorder
from fddp.runtime.watching.watcher import shared_memory
from fddp.runtime.watching.watcher.shared_memory import (
    MESSAGES,
    PROPOSAL,
    REPORT,
    SIZE,
    VERDICT,
    Record,
    message,
)


def head(recorder: Recorder) -> dict[str, Any]:
    return REPORT.read(recorder.memory)


def test_no_two_records_share_a_byte():
    records = [value for value in vars(shared_memory).values() if isinstance(value, Record)]
    records += [message(number) for number in range(1, MESSAGES)]
    records.sort(key=lambda record: record.place)
    assert (
        all(earlier.end <= later.place for earlier, later in pairwise(records))
        and records[-1].end == SIZE
    )


def test_a_watcher_loads_nothing_but_the_standard_library():
    loads = "import sys; sys.path.insert(0, sys.argv[1]); import watcher.main; print(*sys.modules)"
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        loads,
        str(Path(shared_memory.__file__).parents[1]),
    ]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    tops = {name.partition(".")[0] for name in loaded}
    assert tops - {"watcher", "__main__"} <= sys.stdlib_module_names and "fddp" not in tops


def test_a_step_of_all_ranks_is_told_apart_from_one_of_some():
    recorder = Recorder(bytearray(SIZE), 3)
    for processes, together in ((3, True), (2, False)):
        with recorder.step(processes):
            recorder.say("stage 1")
            assert (head(recorder)["together"], head(recorder)["doing"]) == (together, "stage 1")
        assert (head(recorder)["together"], head(recorder)["doing"]) == (False, "between steps")
    assert (head(recorder)["steps"], head(recorder)["calls"]) == (2, 1)


def test_the_typical_step_is_what_three_of_four_take_at_least_without_the_first(monkeypatch):
    clock = [0.0]
    recorder = Recorder(bytearray(SIZE))
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: clock[0])
    for number in range(2 * STEPS):
        clock[0] += 100.0 if number in (1, 30) else 2.0 if number % 3 else 1.5
        with recorder.step(1):
            pass
        if number < 3:
            assert head(recorder)["typical"] == 0.0
    assert head(recorder)["typical"] == 1.5


def test_steps_of_some_ranks_tell_nothing_of_the_pace_of_all():
    recorder = Recorder(bytearray(SIZE), 3)
    for _ in range(STEPS):
        with recorder.step(2):
            pass
    assert head(recorder)["typical"] == 0.0


def test_what_hosts_say_to_each_other_is_a_call_and_no_step():
    recorder = Recorder(bytearray(SIZE), 2)
    with recorder.call("all_gather", 2):
        assert (head(recorder)["together"], head(recorder)["doing"]) == (True, "all_gather")
    with (
        recorder.inside("fddp.evaluate"),
        recorder.inside("fddp.whole"),
        recorder.call("all_gather", 2),
    ):
        assert head(recorder)["doing"] == "all_gather of fddp.evaluate"
    assert (head(recorder)["steps"], head(recorder)["calls"]) == (0, 2)


def test_an_error_ends_a_step_which_then_does_not_count():
    recorder = Recorder(bytearray(SIZE))
    with pytest.raises(ArithmeticError), recorder.step(1):
        raise ArithmeticError
    assert not head(recorder)["together"]
    assert (head(recorder)["steps"], head(recorder)["calls"]) == (0, 0)


def test_steps_that_ended_in_an_error_are_no_pace():
    recorder = Recorder(bytearray(SIZE))
    for _ in range(3):
        with pytest.raises(ArithmeticError), recorder.step(1):
            raise ArithmeticError
    for _ in range(2):  # the pace is that of the third step and those after it
        with recorder.step(1):
            pass
    assert head(recorder)["typical"] == 0.0


def test_the_last_messages_are_kept_with_their_times():
    recorder = Recorder(bytearray(SIZE))
    for number in range(MESSAGES + 3):
        with recorder.message(f"bucket {number}", 8 * number):
            assert head(recorder)["sending"] == f"bucket {number}"
    assert head(recorder)["sending"] == ""
    records = [message(number).read(recorder.memory) for number in range(MESSAGES)]
    assert sorted(record["number"] for record in records) == list(range(3, MESSAGES + 3))
    for record in records:
        assert 0 < record["begin"] <= record["end"] and record["nbytes"] == 8 * record["number"]
        assert record["name"] == f"bucket {record['number']}"


def test_messages_of_two_threads_keep_their_own_places():
    recorder = Recorder(bytearray(SIZE))
    entered = threading.Barrier(2)

    def send(name: str) -> None:
        with recorder.message(name, 1):
            entered.wait(10)

    threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [message(number).read(recorder.memory) for number in range(2)]
    assert {record["name"] for record in records} == {"a", "b"}
    assert all(record["end"] >= record["begin"] > 0 for record in records)


class Later:
    """An array that is not ready yet."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_a_step_that_was_launched_lasts_until_its_result_is_there():
    recorder = Recorder(bytearray(SIZE))
    result = Later()
    with recorder.step(1):
        recorder.launched(result)
    recorder.live()
    assert head(recorder)["together"] and head(recorder)["doing"] == "launched"
    with recorder.step(1):  # Python is a step ahead
        assert head(recorder)["doing"] == "launched"
    result.ready = True
    recorder.live()
    assert not head(recorder)["together"] and head(recorder)["doing"] == "between steps"


def test_a_sign_of_life_tells_what_the_watchers_found():
    recorder = Recorder(bytearray(SIZE))
    assert not recorder.live().end
    VERDICT.write(recorder.memory, True, "rank 1 died")
    assert recorder.live() == (True, "rank 1 died")
    assert head(recorder)["life"] == 2


def test_another_process_never_sees_a_half_written_journal():
    """By a half-written journal a rank that has begun a step would seem not to have moved since the
    boot."""
    file = os.memfd_create("journal")
    os.ftruncate(file, SIZE)
    memory = mmap(file, SIZE)
    recorder = Recorder(memory)
    with recorder.step(1):
        pass
    steps = REPORT.names.index("steps")
    read = (
        f"import mmap, struct; memory = mmap.mmap({file}, {SIZE}); head = "
        f"struct.Struct({REPORT.layout.format!r})\n"
        "print('reads', flush=True)\n"
        f"for _ in range(9**6): assert head.unpack_from(memory, {REPORT.place})[{steps}] == 1\n"
    )
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", read], pass_fds=[file], **pipes) as reader:
        assert reader.stdout and reader.stdout.readline() == "reads\n"
        while reader.poll() is None:
            recorder.say("stage 1")
        assert reader.stderr and reader.stderr.read() == ""
    os.close(file)


def test_long_names_are_cut_and_nothing_else_is_written_over():
    recorder = Recorder(bytearray(SIZE))
    recorder.say("ü" * 100)
    assert head(recorder)["doing"] == "ü" * 60 and head(recorder)["sending"] == ""
    assert head(recorder)["doing"].isprintable() and head(recorder)["place"] == ""


def test_a_process_alone_stops_when_it_is_told_to():
    recorder = Recorder(bytearray(SIZE))
    assert not recorder.stops()
    recorder.ask_to_stop()
    assert recorder.stops()


def test_ranks_stop_at_the_question_that_all_agreed_to():
    recorder = Recorder(bytearray(SIZE), 2)

    def propose(question: int, settled: bool) -> None:
        PROPOSAL.write(recorder.memory, question, settled)

    def agreed() -> int:
        return head(recorder)["agreed"]

    assert not recorder.stops()
    propose(1, settled=False)  # too late: this is the second question
    assert not recorder.stops() and agreed() == -1
    propose(4, settled=False)
    assert not recorder.stops() and agreed() == 4
    threading.Timer(0.1, propose, (4, True)).start()
    assert recorder.stops() and PROPOSAL.read(recorder.memory)["settled"]  # it waited for others
    assert not recorder.stops()


def test_a_training_that_goes_on_counts_from_where_it_was_saved():
    recorder = Recorder(bytearray(SIZE))
    recorder.goes_on(300)
    assert head(recorder)["before"] == 300
    for _ in range(4):
        with recorder.step(1):
            pass
    recorder.goes_on(2)  # from an older checkpoint, in the same process
    assert head(recorder)["before"] + head(recorder)["steps"] == 2


class OnItsWay:
    """The future result of a step; ready when the test sets it."""

    over = False

    def is_ready(self) -> bool:
        return self.over


@pytest.mark.parametrize("end", ["finished", "failed", "left the world"])
def test_a_script_that_has_ended_stays_so_while_its_last_step_is_under_way(end: str):
    recorder = Recorder(bytearray(SIZE), 2)
    result = OnItsWay()
    with recorder.step(2):
        recorder.launched(result)
    recorder.say(end)
    recorder.live()
    assert head(recorder)["doing"] == end
    assert sys.getrefcount(result) == 2  # else the thread of `live` would free it
    with recorder.call("all_gather", 2):  # by a handler at Python's exit
        assert head(recorder)["doing"] == end
    recorder.say("finished")
    assert head(recorder)["doing"] == end
