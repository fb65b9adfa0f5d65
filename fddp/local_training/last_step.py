"""The number of the last step, and with it the exchanges that are due in the next one."""

from typing import Any, NamedTuple

import jax

from fddp.optim import LocalSteps, Met


class LastStep(NamedTuple):
    """The last step, or the one that is due."""

    step: Any = None
    """`state.step` of its result, perhaps not computed yet."""
    number: int = 0
    met: Met = Met()
    """Synchronizations around it."""

    def following(self, steps: LocalSteps, step: Any) -> tuple["LastStep", tuple[int, ...]]:
        """Returns the step after `step`, a state's number, and the exchanges due in it."""
        # The last result is recognized by identity: its number may still be in computation.
        number = self.number + 1 if step is self.step else int(jax.device_get(step)) + 1
        due, met = steps.sends(number, self.met)
        return LastStep(None, number, met), due
