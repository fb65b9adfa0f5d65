"""`fddp.preempted`: SIGTERM stops a rank, but no process that it has forked."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import fddp

# In a process of its own, for JAX warns of a fork. Each rank is forked before JAX starts.
FORKS = """
import multiprocessing, os, signal, time, warnings
import fddp

warnings.simplefilter("ignore")
context = multiprocessing.get_context("fork")


def child(ready):
    ready.set()
    while True:  # a long sleep may begin after a signal has come and before its handler runs
        time.sleep(0.01)


def ended():
    ready = context.Event()
    process = context.Process(target=child, args=(ready,))
    process.start()
    ready.wait()
    process.terminate()
    process.join(300)
    process.kill()
    return process.exitcode


def rank(before):
    if before:
        signal.signal(signal.SIGTERM, before)
    print(fddp.preempted(), ended(), ended(), fddp.preempted())
    os.kill(os.getpid(), signal.SIGTERM)
    print(fddp.preempted())


for before in (None, lambda *_: os._exit(7)):
    process = context.Process(target=rank, args=(before,))
    process.start()
    process.join()
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """The output of two ranks: one without a handler, and one with a handler that exits with 7."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    words = [sys.executable, "-c", FORKS]
    completed = subprocess.run(words, env=env, capture_output=True, text=True, timeout=900)
    print(completed.stderr)
    return completed.stdout.splitlines()


@pytest.mark.ranks
@pytest.mark.parametrize(("rank", "code"), [(0, -15), (1, 7)], ids=["nobody", "a handler"])
def test_a_forked_process_ends_by_sigterm_as_without_fddp_and_stops_no_rank(
    lines: list[str],
    rank: int,
    code: int,
):
    assert lines[2 * rank :][:2] == [f"False {code} {code} False", "True"]


def test_a_first_call_on_another_thread_is_refused_and_the_next_ones_are_not():
    fddp.shutdown()  # an earlier test of this process may have installed the handler
    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(RuntimeError, match="call it once on the main thread"):
            thread.submit(fddp.preempted).result()
        assert not fddp.preempted()
        assert not thread.submit(fddp.preempted).result()
    fddp.shutdown()  # and with it the handler
