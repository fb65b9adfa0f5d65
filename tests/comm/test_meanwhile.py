"""A process that is busy for long prints its status: in lines, or in one line of a terminal."""

import io
import sys
import threading
from collections.abc import Callable

import pytest

from fddp.comm import reports


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def counting(most: int) -> tuple[Callable[[], str], threading.Event]:
    """A status function that counts its calls, and the event of its call number `most`."""
    calls = list[None]()
    enough = threading.Event()

    def state() -> str:
        calls.append(None)
        if len(calls) >= most:
            enough.set()
        return f"said {len(calls)}"

    return state, enough


def test_it_is_said_first_after_a_while_and_again_and_again(capsys):
    state, enough = counting(3)
    before = threading.active_count()
    with reports(state, 0.01, 0.01):
        assert enough.wait(60)
    assert capsys.readouterr().err.splitlines()[:3] == [
        "fddp: said 1",
        "fddp: said 2",
        "fddp: said 3",
    ]
    assert threading.active_count() == before


def test_the_second_word_comes_later_than_the_first(capsys):
    state, enough = counting(1)
    with reports(state, 0.01, 1e6):
        assert enough.wait(60)
    assert capsys.readouterr().err == "fddp: said 1\n"


def test_nothing_is_said_of_what_is_over_before(capsys):
    with reports(lambda: "never", 1e6, 1e6):
        pass
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_one_line_is_rewritten_and_ended(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    state, enough = counting(2)
    with reports(state, 0.01, 0.01):
        assert enough.wait(60)
    assert shown.getvalue().startswith("\rfddp: said 1\x1b[K\rfddp: said 2\x1b[K")
    assert shown.getvalue().count("\n") == 1 and shown.getvalue().endswith("\x1b[K\n")


def test_a_line_that_does_not_fit_a_terminal_is_not_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    state, enough = counting(2)
    with reports(state, 0.01, 0.01):
        assert enough.wait(60)
    assert shown.getvalue().startswith("fddp: said 1\nfddp: said 2\n")


def test_the_blocks_error_passes_and_no_other_takes_its_place(monkeypatch):
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    closed.close()
    state, enough = counting(1)
    with pytest.raises(KeyError, match="of the block"), reports(state, 0.01, 0.01):
        assert enough.wait(60)
        raise KeyError("of the block")


def test_where_no_thread_can_start_nothing_is_said_and_the_block_runs(monkeypatch):
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    finished = False
    with reports(lambda: "never", 0.0, 0.0):
        finished = True
    assert finished
