"""Calls of a training loop to the watchers: signs of life, and requests to stop.

Source: `reached_preemption_sync_point` in JAX's `multihost_utils`.
"""

import os
import signal
import threading
from typing import Any

from fddp.comm import Journal
from fddp.runtime.world import init, on_leaving

# The previous handler of SIGTERM; empty until `preempted` replaces it.
_before: list[Any] = []


def alive() -> None:
    """Reports progress of this rank in a long loop between steps, such as an evaluation.

    Example:
      >>> import fddp
      >>> for batch in range(3):
      ...     fddp.alive()
    """
    init().journal.between()


def preempted() -> bool:
    """Returns True if all ranks stop here, because a rank received SIGTERM.

    Call it once after each step. Schedulers send SIGTERM some time before they end a job. The first
    call replaces its handler in this process; in forked processes the signal keeps its previous
    effect. All ranks get the same answer: if it is True, save the state and leave the loop.

    Returns:
      True after the last step.

    Raises:
      RuntimeError: the first call is not on the main thread, on which alone Python handles signals.

    Example:
      >>> import fddp
      >>> fddp.preempted()
      False
    """
    journal = init().journal
    if not _before:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "fddp.preempted() handles SIGTERM, which Python allows on the main thread only: "
                "call it once on the main thread, after fddp.init(), before another thread trains."
            )
        _take_over(journal)
    return journal.stops()


def _take_over(journal: Journal) -> None:
    pid = os.getpid()

    def on_sigterm(number: int, _: object) -> None:
        if os.getpid() == pid:
            journal.ask_to_stop()
        else:  # a forked process inherits this handler and the journal's memory, but is no rank
            signal.signal(number, previous_handler)
            os.kill(os.getpid(), number)

    previous_handler = signal.signal(signal.SIGTERM, on_sigterm) or signal.SIG_DFL
    _before.append(previous_handler)
    on_leaving(lambda: signal.signal(signal.SIGTERM, _before.pop()))
