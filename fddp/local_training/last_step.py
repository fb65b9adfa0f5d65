"""The step that ran last: its number says which step is due, and which fragment that one synchronizes."""

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

    def following(self, steps: LocalSteps, step: Any) -> tuple["LastStep", int | None]:
        """Finds the step that is due.

        Args:
          steps: says which fragment is due.
          step: the number that the state has, perhaps still computed or promised.

        Returns:
          The step, and the fragment that it synchronizes; None for none.
        """
        # The number itself is not asked for, where it is known: it may still be computed.
        if isinstance(step, Promise) and step is not self.step:
            step = step.result()
        number = self.number + 1 if step is self.step else int(jax.device_get(step)) + 1
        fragment, met = steps.sends(number, self.met)
        return LastStep(None, number, met), fragment
