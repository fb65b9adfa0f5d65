"""`fddp.preempted`: SIGTERM asks a rank to stop, and no process that it has forked."""

import os
import subprocess
import sys

import pytest

# In a process of its own, for JAX warns of a fork.
FORKS = """
import multiprocessing, os, signal, time, warnings
import fddp

warnings.simplefilter("ignore")


def child(ready):
    ready.set()
    time.sleep(60)


def ended():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=child, args=(ready,))
    process.start()
    ready.wait()
    process.terminate()
    process.join(30)
    process.kill()
    return process.exitcode


{before}
print(fddp.preempted(), ended(), ended(), fddp.preempted())
os.kill(os.getpid(), signal.SIGTERM)
print(fddp.preempted())
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "code"),
    [("", -15), ("signal.signal(signal.SIGTERM, lambda *_: os._exit(7))", 7)],
    ids=["nobody", "a handler"],
)
def test_a_forked_process_ends_by_sigterm_as_without_fddp_and_stops_no_rank(before: str, code: int):
    words = [sys.executable, "-c", FORKS.format(before=before)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == f"False {code} {code} False\nTrue\n", done.stderr
