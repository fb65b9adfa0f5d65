"""What steps leave under way on a communicator of its own: one job after the other."""

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait


class Lane:
    """Jobs of messages that go on after the step that gave them has returned.

    Each begins when the one before it is over, so that those of several steps never meet: over Gloo XLA keeps one
    communicator for each order of the devices, whichever step asks for it. All ranks give jobs in the same order, that
    of their steps.
    """

    def __init__(self) -> None:
        self._last: Future[None] | None = None

    def add(self, thread: Executor, job: Callable[..., None], *args: object) -> Future[None]:
        """Begins a job on a thread when the one before it is over, whatever became of that.

        Args:
          thread: where it runs.
          job: what is to be done.
          *args: its arguments.

        Returns:
          Its end.
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
