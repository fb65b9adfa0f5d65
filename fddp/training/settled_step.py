"""The record of a training step, before and after its first batch settles it."""

from typing import Any

import jax
from jaxtyping import PyTree

from fddp.buckets import BucketPlan
from fddp.comm import Group
from fddp.step import (
    FinishStep,
    Options,
    Replica,
    Settled,
    StepOptimizer,
    Training,
    TrainState,
    lower,
    ready,
)
from fddp.step.schedules import Timeline
from fddp.training.digests import comparing
from fddp.training.skips import Skips

# Members for fddp's own rooms, which completion and `help` omit.
INTERNAL = {"local_form", "on", "settle", "settled", "skips", "steps", "training"}


class _Public(type):
    def __dir__(cls) -> list[str]:  # completion reads the members of the class as well
        return [name for name in super().__dir__() if name not in INTERNAL]


class SettledStep(metaclass=_Public):
    """The record of a training step: its options, and the plan once a batch has settled it."""

    def __init__(
        self,
        replica: Replica,
        optimizer: StepOptimizer,
        use: FinishStep,
        training: Training | None = None,
    ) -> None:
        self._replica = replica
        self._optimizer = optimizer
        self._use = use
        self._guess: tuple[BucketPlan, TrainState] | None = None
        self._check = comparing(replica.group, replica.options.check_replicas_every)
        self._settled: Settled | None = None
        self.training = training or Training()
        self.steps = 0  # number of steps of this object
        self.skips = Skips()  # steps with non-finite gradients

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in INTERNAL]

    def __repr__(self) -> str:
        settled = self._settled
        how = settled.plan.summary if settled else "to be settled by the first batch"
        return (
            f"TrainStep({self._replica.loss}, size={self.group.size}, "
            f"backend={self.group.backend!r}, {how})"
        )

    @property
    def group(self) -> Group:
        """The replicas."""
        return self._replica.group

    @property
    def optimizer(self) -> Any:
        """The optax transformation; with `fddp.local_steps`, the inner one."""
        return self._optimizer.inner

    @property
    def options(self) -> Options:
        """The options of buckets, accumulation and communication."""
        return self._replica.options

    @property
    def plan(self) -> BucketPlan:
        """The buckets of one device: DDP's guess until the first batch."""
        return self._settled.plan if self._settled else self._guessed[0]

    @property
    def local_form(self) -> TrainState:
        """Shapes and dtypes of one replica's share of the state, with pending sums once passed."""
        return self._settled.checked_forms.share if self._settled else self._guessed[1]

    @property
    def settled(self) -> Settled:
        """The plan and the programs, after the first batch."""
        if self._settled is None:
            raise ValueError("there is no program yet: the first batch settles it.")
        return self._settled

    def settle(self, state: TrainState, batch: PyTree) -> None:
        """Settles the plan by a batch; compiles nothing."""
        self._settled, _ = ready(self._settled, self._replica, self._use, state, batch)

    def timeline(self) -> Timeline:
        """Returns when the last step computed, and when its messages travelled and were awaited.

        It waits for the step's messages.

        Returns:
          The timeline; `print` shows a row for each message.

        Raises:
          ValueError: XLA sends the messages: one process has several devices, or GPUs.
        """
        timeline = self.settled.runner.timeline
        if timeline is None:
            raise ValueError(
                "XLA sends this step's messages, and stamps none: jax.profiler.trace(folder) shows "
                "them in time, fddp.measure(step, state, batches) their shares, and "
                "fddp.audit(step, state, batch) what overlaps."
            )
        return timeline()

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lowers the step, as `jax.jit(f).lower` does, to inspect its program.

        Args:
          state: as for a step.
          batch: as for a step.

        Returns:
          The lowered program; `.compile().as_text()` is the program that runs.

        Raises:
          ValueError: with `virtual_replicas`, the step is several programs.
        """
        self._settled, args = ready(self._settled, self._replica, self._use, state, batch)
        return lower(self._settled, args)

    @property
    def _guessed(self) -> tuple[BucketPlan, TrainState]:
        if self._guess is None:
            raise ValueError("a plan exists once a state does: call step.init(params) first.")
        return self._guess

    def _expect(self, guess: BucketPlan, share: TrainState) -> None:
        """Sets the provisional plan; drops the settled step of parameters with other shapes."""
        if self._settled and (self.plan.leaves, self.plan.treedef) != (guess.leaves, guess.treedef):
            self._settled = None
        self._guess = guess, share
