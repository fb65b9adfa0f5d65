"""Calls by which a training loop tells the watchers that it lives, and asks them whether to stop.

Source: `reached_preemption_sync_point` in JAX's `multihost_utils`.
"""

import signal
from typing import Any

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
    answer: save the state then, and leave the loop.

    Returns:
      Whether this is the last step.

    Example:
      >>> import fddp
      >>> fddp.preempted()
      False
    """
    journal = init().journal
    if not _before:
        _before.append(signal.signal(signal.SIGTERM, lambda *_: journal.ask_to_stop()))
        on_leaving(lambda: signal.signal(signal.SIGTERM, _before.pop() or signal.SIG_DFL))
    return journal.stops()
