"""Islands of one process that take turns: simulated with given seconds, or made again from a log.

No clock is read and nothing waits, so that the result depends on the arguments alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, NamedTuple

from fddp.jax_internals import without_context_mesh
from fddp.local_training.island_state import Island, version_of
from fddp.local_training.merge_log import Line, Meeting, Merged
from fddp.local_training.merging import Contribution, Merging, SharedParams, merge
from fddp.optim import Arrival, LocalSteps, Met, Quorum, due_at
from fddp.step import TrainState

# (state, batch) → (state, what the step tells)
Step = Callable[[TrainState, Any], tuple[TrainState, Any]]


class Islands(NamedTuple):
    """The result of islands that train in turn."""

    params: Any
    """The newest shared parameters, on the host."""
    states: tuple[TrainState, ...]
    """The state of each island."""
    log: tuple[Line, ...]
    """The order of the merges."""


@dataclass
class InTurn:
    """Islands that take turns."""

    optimizer: LocalSteps
    islands: Sequence[Island]
    steps: Sequence[Step]
    """The step of each island."""
    merging: Merging
    shared: SharedParams
    states: list[TrainState]
    batches: Sequence[Iterator[Any]]
    log: list[Line] = field(default_factory=list)

    def train(self, island: int, until: Callable[[int], bool]) -> bool:
        """Lets an island train until a step is the last one for now.

        Args:
          island: its number.
          until: whether the step of a number is the last one.

        Returns:
          Whether it came to that step; else it has no more batches.
        """
        number = int(self.states[island].step)
        for batch in self.batches[island]:
            self.states[island], _ = self.steps[island](self.states[island], batch)
            number += 1
            if until(number):
                return True
        return False

    def due(self, number: int) -> bool:
        """Whether an island sends after the step of a number."""
        return bool(self.optimizer.sends(number, Met())[0])

    @without_context_mesh
    def given(self, island: int) -> Contribution:
        """The contribution of an island."""
        return self.islands[island].contribution(self.states[island])

    def merge(self, contributions: Sequence[Contribution]) -> None:
        """Merges contributions, and notes their order."""
        self.shared = merge(self.merging, self.shared, contributions)
        islands, began, weights, steps, _ = zip(*contributions)
        self.log.append(Merged(self.shared.version, islands, began, weights, steps))

    @without_context_mesh
    def land(self, island: int, shared: SharedParams, mix: float) -> None:
        """Lets an island go on with shared parameters, and a share of its own."""
        self.states[island] = self.islands[island].landed(mix, self.states[island], shared)

    def meet(self) -> None:
        """Lets all islands go on with the newest parameters."""
        self.log.append(Meeting(self.shared.version))
        for island in range(len(self.states)):
            self.land(island, self.shared, 0.0)


def simulate(islands: InTurn, rule: Quorum, seconds: Callable[[int, int], float]) -> None:
    """Trains islands whose steps take given seconds, until all have no more batches and meet.

    Args:
      islands: at their beginning.
      rule: of the quorum.
      seconds: (island, number of the step) → the seconds that it takes.
    """
    came = dict[int, tuple[float, Contribution]]()
    comes = dict[int, float]()  # when the next contribution of each island does
    began = dict.fromkeys(range(len(islands.states)), islands.shared.version)  # of those that take part
    over = set[int]()  # those that have sent their last contribution

    def set_out(island: int, now: float) -> None:
        before = int(islands.states[island].step)
        if not islands.train(island, islands.due):
            over.add(island)
        last = int(islands.states[island].step)
        if last > before:
            comes[island] = now + sum(seconds(island, number) for number in range(before + 1, last + 1))
        else:
            del began[island]

    for island in range(len(islands.states)):
        set_out(island, 0.0)
    while comes or came:
        arrivals = [Arrival(island, at) for island, (at, _) in came.items()]
        due = due_at(rule, islands.shared.version, began, arrivals)
        following = min(comes, key=lambda island: (comes[island], island), default=-1)
        if due is None or (comes and comes[following] <= due):
            came[following] = comes.pop(following), islands.given(following)
            continue
        chosen = [came[island][1] for island in sorted(came)]
        came = {}
        islands.merge(chosen)
        for one in chosen:
            if one.island in over:  # it waits for the meeting
                del began[one.island]
                continue
            islands.land(one.island, islands.shared, islands.optimizer.mix)
            began[one.island] = islands.shared.version
            set_out(one.island, due)
    islands.meet()


def replay(islands: InTurn, log: Iterable[Line]) -> None:
    """Trains islands in the order of a log.

    Args:
      islands: at the beginning of the training that the log is of.
      log: its lines.

    Raises:
      ValueError: the log does not belong to this training.
    """
    lines = list(log)
    needed = Counter(began for line in lines if isinstance(line, Merged) for began in line.began)
    kept = {islands.shared.version: islands.shared}
    for line in lines:
        if isinstance(line, Meeting):
            islands.meet()
            continue
        if line.version != islands.shared.version + 1:
            raise ValueError(
                f"version {line.version} follows version {islands.shared.version} in the log: it is of a training that "
                "went on from a checkpoint, or not whole."
            )
        islands.merge([_again(islands, kept, *one) for one in zip(line.islands, line.began, line.weights, line.steps)])
        kept[islands.shared.version] = islands.shared
        needed.subtract(line.began)
        kept = {version: shared for version, shared in kept.items() if needed[version] > 0}


def _again(
    islands: InTurn, kept: dict[int, SharedParams], island: int, began: int, weight: float, step: int
) -> Contribution:
    """An island's contribution, made once more."""
    if version_of(islands.states[island]) != began:
        islands.land(island, kept[began], islands.optimizer.mix)
    islands.train(island, lambda number: number == step)
    given = islands.given(island)
    # Replicas of an island add their weights in another order.
    if (given.began, given.step) != (began, step) or not isclose(given.weight, weight, rel_tol=1e-5):
        raise ValueError(
            f"island {island} came in the log with step {step} and weight {weight:g}, and now with step {given.step} "
            f"and weight {given.weight:g}: give the loss, the optimizer and the batches of that training."
        )
    return given
