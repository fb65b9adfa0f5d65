"""Chooses the bits of each bucket for `fddp.hooks.adaptive`, from the link and the stages of a step.

The choice stands outside of the hook: a hook is a pure function inside of a program, and sees neither the clock nor the
other buckets. `fit_bits` measures stages and link. `refit_bits` looks at what the steps of a training have noted
themselves, and chooses again where the link or the computing has changed.

Source: Li et al., "PyTorch Distributed" (VLDB 2020), section 6.2.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from fddp.analysis.tuning.bits_on_paper import Message, fitting_bits
from fddp.analysis.tuning.link import Link, measure_link
from fddp.hooks import adaptive
from fddp.schedules import Communicate, TaskList, Timeline
from fddp.step import check_step, first_tasks
from fddp.training import TrainStep
from fddp.wording import table

EXPOSED = 0.05  # the share of a step that traffic may take behind the computing
STEPS = 5


@dataclass(frozen=True)
class FittedBits:
    """The bits of each bucket, and what they were chosen from; the same on all ranks."""

    link: Link
    """The cost of an all-reduce."""
    messages: tuple[Message, ...]
    """The sums of buckets in the order in which they leave: when each is ready, on the slowest rank, and when due."""
    bits: tuple[int, ...]
    """Bits of each number of a bucket: 32, 16, 8, 4 or 1."""

    def __str__(self) -> str:
        def row(one: Message) -> tuple[str, ...]:
            bits = self.bits[one.bucket]
            seconds = (one.ready_s, self.link.seconds(one.nbytes * bits / 32), one.due_s)
            ready, takes, due = (f"{1e3 * x:.1f}" for x in seconds)
            return str(one.bucket), f"{one.nbytes:,}", str(bits), ready, takes, due

        head = ("bucket", "bytes", "bits", "ready ms", "takes ms", "due ms")
        return "\n".join([f"an all-reduce takes {self.link}", *table([head, *map(row, self.messages)])])


def fit_bits(step: TrainStep, state: Any, batch: Any, *, exposed: float = EXPOSED) -> FittedBits:
    """Measures a step's stages and the link, and chooses for each bucket the bits whose traffic just fits.

    Every rank calls it. It runs the step a few times on the batch, and leaves the state alone. A bucket is due when the
    step's computing ends. In an eager step it is due when the next step's forward pass first reads what it brings.

    Args:
      step: a step whose schedule is staged or eager.
      state: its state, which is copied.
      batch: this process's rows.
      exposed: the share of a step's computing that traffic may take behind it.

    Returns:
      The bits; `step.with_options(hook=fddp.hooks.adaptive(fitted.bits))` uses them, and goes on from a state of any
      adaptive hook.

    Raises:
      ValueError: the step is one program, which has no stages; or exposed is below 0.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), group=group, schedule="staged")
      >>> fddp.fit_bits(step, step.init(jnp.ones(4)), jnp.ones((2, 4)), exposed=1000.0).bits
      (32,)
    """
    _check("fit_bits", step, exposed)
    listed = step.tasks(state, batch)
    _refuse_one_program("fit_bits", step)
    lines = [one.timeline for one in step.measure(state, [batch] * STEPS).steps]
    messages = _messages(step, listed, lines, exposed)
    link = measure_link(step.group) if step.group.size > 1 else Link(0.0, float("inf"))
    bits = fitting_bits(messages, lambda k, bits: link.seconds(messages[k].nbytes * bits / 32))
    return FittedBits(link, messages, bits)


def refit_bits(step: TrainStep, *, exposed: float = EXPOSED) -> TrainStep:
    """Chooses the bits of an adaptive hook again, from what the last steps noted of their stages and messages.

    Every rank calls it at the same step, now and then. Nothing is run for it, and ranks exchange a few numbers. Other
    bits are taken to last as long a byte as the messages that have them; or, where none has, in proportion to a
    message's own. More bits last less than in proportion, as latency and coding stay. So where a link is fast and
    coding slow, a call that tried fewer bits in vain is followed by one that takes them back.

    Args:
      step: a step whose hook is `fddp.hooks.adaptive(bits)`, and whose schedule is staged or eager.
      exposed: the share of a step's computing that traffic may take behind it.

    Returns:
      The step itself, as long as its bits are right; else one with other bits, which goes on from the state and is
      compiled at its first batch.

    Raises:
      ValueError: the hook is another one, the step has run fewer than two times, or is one program; or exposed is below
        0; on every rank.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> hook, loss = fddp.hooks.adaptive([8]), lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), group=group, schedule="staged", hook=hook)
      >>> state = step.init(jnp.ones(4))
      >>> for _ in range(3):
      ...     state, info = step(state, jnp.ones((2, 4)))
      >>> fddp.refit_bits(step, exposed=1000.0).options.hook
      Hook(adaptive(32))
    """
    _check("refit_bits", step, exposed)
    given = step.options.hook.bits if step.options.hook else ()
    if not given:
        hook = step.options.hook
        raise ValueError(f"refit_bits chooses the bits of fddp.hooks.adaptive, and this step's hook is {hook}.")
    if step.steps:
        _refuse_one_program("refit_bits", step)
    if not step.lately:
        raise ValueError("refit_bits looks at the last steps, and the first one, which compiles, does not count.")
    listed = first_tasks(step.settled)
    lines = list(step.lately)
    messages = _messages(step, listed, lines, exposed)
    now = [_bits_of(given, one.bucket) for one in messages]
    took = _took(step, listed, lines)
    paces = {each: _pace([(s, one.nbytes) for s, one, n in zip(took, messages, now) if n == each]) for each in now}

    def seconds(k: int, bits: int) -> float:
        if bits == now[k]:
            return took[k]
        return messages[k].nbytes * paces[bits] if bits in paces else took[k] * bits / now[k]

    bits = fitting_bits(messages, seconds)
    before = tuple(_bits_of(given, bucket) for bucket in range(len(bits)))
    return step if bits == before else step.with_options(hook=adaptive(bits))


def _bits_of(given: Sequence[int], bucket: int) -> int:
    """The bits of a bucket; the last ones hold for all that follow."""
    return given[min(bucket, len(given) - 1)]


def _pace(some: Sequence[tuple[float, int]]) -> float:
    """Seconds for a byte of a bucket, of messages with the same bits."""
    return sum(seconds for seconds, _ in some) / max(1, sum(nbytes for _, nbytes in some))


def _check(call: str, step: TrainStep, exposed: float) -> None:
    check_step(call, step)
    if not exposed >= 0:
        raise ValueError(f"{call}: exposed must be 0 or more, got {exposed!r}.")


def _refuse_one_program(call: str, step: TrainStep) -> None:
    if step.settled.is_one_program:
        raise ValueError(f"{call} looks at stages, and this step is one program: make it with schedule='staged'.")


def _sums(listed: TaskList) -> list[Communicate]:
    """The sums of buckets, in the order in which they leave."""
    of = [(one, one.reduction) for one in listed.messages]
    return [one for one, sum in of if sum.bucket is not None and sum.collective != "all_gather"]


def _messages(step: TrainStep, listed: TaskList, lines: Sequence[Timeline], exposed: float) -> tuple[Message, ...]:
    """The sums of buckets, with the times of the slowest rank."""
    stages = [task for task in listed.tasks if task.kind == "compute"]
    seconds = np.median([[span.seconds for span in line.compute] for line in lines], axis=0)
    ends = list(accumulate(step.group.all_reduce(seconds, op="max").tolist()))
    begins = [0.0, *ends]
    until = ends[-1] * (1 + exposed)
    # An eager step promises what updates make, and the next step's stages wait for what they read.
    promised = step.settled.runner.promises

    def message(one: Communicate) -> Message:
        bucket = one.reduction.bucket or 0
        ready = next(end for end, stage in zip(ends, stages) if one.reads[0] in stage.writes)
        brings = {made.replaces for made in _made_of(listed, one)} if promised else set()
        reads = [begin for begin, stage in zip(begins, stages) if brings.intersection(stage.reads)]
        return Message(bucket, ready, until + min(reads, default=0.0), step.plan.buckets[bucket].nbytes)

    return tuple(map(message, _sums(listed)))


def _made_of(listed: TaskList, message: Communicate) -> set[Any]:
    """The values that wait for a message."""
    made = set[Any](message.writes[:1])
    for task in listed.tasks:
        if task.kind == "update" and made.intersection(task.reads):
            made.update(task.writes)
    return made


def _took(step: TrainStep, listed: TaskList, lines: Sequence[Timeline]) -> list[float]:
    """Seconds of each sum of a bucket, without those in which a rank waits for the others."""
    # A message that crosses the border of eager steps has a part in each of two timelines.
    names = [one.name for one in _sums(listed)]
    seconds = [
        [sum(span.seconds for span in line.communication if span.name == name) for name in names] for line in lines
    ]
    least = step.group.all_reduce(np.median(seconds, axis=0), op="min").tolist()
    return [each / names.count(name) for name, each in zip(names, least)]
