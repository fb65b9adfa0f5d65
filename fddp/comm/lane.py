"""A lane: messages that steps leave under way on a communicator of its own, one job after the other."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait


class Lane:
    """Jobs that send messages after the step that added them has returned.

    A job begins when the one before it is over, so that messages of several steps never meet: over Gloo XLA keeps one
    communicator for each order of the devices, whichever step asks for it. All ranks add jobs in the same order, that
    of their steps.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def add(self, thread: Executor, job: Callable[..., None], *args: object) -> Future[None]:
        """Begins a job on a thread when the one before it is over, even if that one failed.

        Args:
          thread: the executor that runs it.
          job: the function to call.
          *args: its arguments.

        Returns:
          A future that is done when the job is over.
        """
        before = self._last

        def follow() -> None:
            if before:
                wait([before])
            job(*args)

        self._last = thread.submit(follow)
        return self._last

    def wait(self) -> None:
        """Waits until nothing is under way."""
        if self._last:
            wait([self._last])
