"""The step that ran last: its number says which step is due, and what that one sends to other islands."""

from typing import Any, NamedTuple

import jax

from fddp.optim import LocalSteps, Met
from fddp.schedules import Promise


class LastStep(NamedTuple):
    """The step that ran last, or is due."""

    step: Any = None
    """Its number, as it was returned: perhaps still computed."""
    number: int = 0
    met: Met = Met()
    """The synchronizations around it."""

    def following(self, steps: LocalSteps, step: Any) -> tuple["LastStep", tuple[int, ...]]:
        """Finds the step that is due.

        Args:
          steps: says what is due.
          step: the number that the state has, perhaps still computed or promised.

        Returns:
          The step, and the numbers of what it sends.
        """
        # The number itself is not asked for, where it is known: it may still be computed.
        if isinstance(step, Promise) and step is not self.step:
            step = step.result()
        number = self.number + 1 if step is self.step else int(jax.device_get(step)) + 1
        due, met = steps.sends(number, self.met)
        return LastStep(None, number, met), due
