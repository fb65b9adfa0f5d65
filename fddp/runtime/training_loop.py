"""Calls by which a training loop tells the watchers that it lives, and asks them whether to stop.

Source: `reached_preemption_sync_point` in JAX's `multihost_utils`.
"""

import os
import signal
from typing import Any

from fddp.comm import Journal
from fddp.runtime.world import init, on_leaving

# The handler of SIGTERM from before `preempted` took it over; empty until then.
_before: list[Any] = []


def alive() -> None:
    """Says that this rank lives and makes progress, in a long loop between steps: an evaluation, say.

    Example:
      >>> import fddp
      >>> for batch in range(3):
      ...     fddp.alive()
    """
    init().journal.between()


def preempted() -> bool:
    """Whether all ranks stop here, because one of them was told to end: ask once after each step.

    The first call takes SIGTERM over, which schedulers send some time before they end a job. All ranks get the same
    answer: save the state then, and leave the loop. In processes that this one forks SIGTERM does what it did before.

    Returns:
      Whether this is the last step.

    Example:
      >>> import fddp
      >>> fddp.preempted()
      False
    """
    journal = init().journal
    if not _before:
        _take_over(journal)
    return journal.stops()


def _take_over(journal: Journal) -> None:
    own = os.getpid()

    def told(number: int, _: object) -> None:
        if os.getpid() == own:
            journal.ask_to_stop()
        else:  # a forked process has this handler too, and the journal's memory, but is no rank
            signal.signal(number, before)
            os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGTERM, told) or signal.SIG_DFL
    _before.append(before)
    on_leaving(lambda: signal.signal(signal.SIGTERM, _before.pop()))
