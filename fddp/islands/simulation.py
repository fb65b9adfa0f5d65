"""Islands that take turns in one process: simulated with given step times, or replayed from a log.

No clock is read and nothing waits, so that the result depends on the arguments alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose
from typing import Any, NamedTuple

from fddp.islands.island_state import Island, version_of
from fddp.islands.local_steps import AsyncSteps
from fddp.islands.merge_log import Line, Meeting, Merged
from fddp.islands.merging import Contribution, Merging, SharedParams, merge
from fddp.islands.quorum import Arrival, due_at
from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState

# (state, batch) → (state, info)
Step = Callable[[TrainState, Any], tuple[TrainState, Any]]


class Islands(NamedTuple):
    """The result of a simulation or a replay."""

    params: Any
    """Latest shared parameters, on the host."""
    states: tuple[TrainState, ...]
    """State of each island."""
    log: tuple[Line, ...]
    """Order of the merges."""


@dataclass
class InTurn:
    """Islands that take turns."""

    optimizer: AsyncSteps
    islands: Sequence[Island]
    steps: Sequence[Step]
    """Step of each island."""
    merging: Merging
    shared: SharedParams
    states: list[TrainState]
    batches: Sequence[Iterator[Any]]
    log: list[Line] = field(default_factory=list)

    def train(self, island: int, until: Callable[[int], bool]) -> bool:
        """Trains an island up to the step that satisfies `until`; False if batches end first."""
        number = int(self.states[island].step)
        for batch in self.batches[island]:
            self.states[island], _ = self.steps[island](self.states[island], batch)
            number += 1
            if until(number):
                return True
        return False

    def due(self, number: int) -> bool:
        """True if an island sends after this step."""
        return bool(self.optimizer.sends(number))

    @without_context_mesh
    def contribution(self, island: int) -> Contribution:
        """Returns the contribution of an island."""
        return self.islands[island].contribution(self.states[island])

    def merge(self, contributions: Sequence[Contribution]) -> None:
        """Merges contributions, and logs their order."""
        self.shared = merge(self.merging, self.shared, contributions)
        islands, began, weights, steps, _ = zip(*contributions)
        self.log.append(Merged(self.shared.version, islands, began, weights, steps))

    @without_context_mesh
    def land(self, island: int, shared: SharedParams, mix: float) -> None:
        """Mixes shared parameters into the state of an island."""
        self.states[island] = self.islands[island].landed(mix, self.states[island], shared)

    def meet(self) -> None:
        """Gives all islands the latest shared parameters."""
        self.log.append(Meeting(self.shared.version))
        for island in range(len(self.states)):
            self.land(island, self.shared, 0.0)


def train_in_order(islands: InTurn, seconds: Callable[[int, int], float]) -> None:
    """Trains islands until their batches end and all meet; `seconds(island, step)` times a step."""
    waiting = dict[int, tuple[float, Contribution]]()
    arrival_times = dict[int, float]()  # of the next contribution of each island
    # Of the active islands.
    versions = dict.fromkeys(range(len(islands.states)), islands.shared.version)
    finished = set[int]()  # islands that have sent their last contribution

    def set_out(island: int, start: float) -> None:
        first = int(islands.states[island].step)
        if not islands.train(island, islands.due):
            finished.add(island)
        last = int(islands.states[island].step)
        if last > first:
            numbers = range(first + 1, last + 1)
            arrival_times[island] = start + sum(seconds(island, number) for number in numbers)
        else:
            del versions[island]

    for island in range(len(islands.states)):
        set_out(island, 0.0)
    while arrival_times or waiting:
        arrivals = [Arrival(island, at) for island, (at, _) in waiting.items()]
        due = due_at(islands.optimizer.quorum, islands.shared.version, versions, arrivals)
        following = min(sorted(arrival_times), key=arrival_times.__getitem__, default=-1)
        if due is None or (arrival_times and arrival_times[following] <= due):
            waiting[following] = arrival_times.pop(following), islands.contribution(following)
            continue
        contributions = [waiting[island][1] for island in sorted(waiting)]
        waiting = {}
        islands.merge(contributions)
        for contribution in contributions:
            if contribution.island in finished:  # it waits for the meeting
                del versions[contribution.island]
                continue
            islands.land(contribution.island, islands.shared, islands.optimizer.mix)
            versions[contribution.island] = islands.shared.version
            set_out(contribution.island, due)
    islands.meet()


def replay(islands: InTurn, log: Iterable[Line]) -> None:
    """Trains islands in the order of a log; raises ValueError if the log is of another training."""
    lines = list(log)
    uses = Counter(began for line in lines if isinstance(line, Merged) for began in line.began)
    history = {islands.shared.version: islands.shared}
    for line in lines:
        if isinstance(line, Meeting):
            islands.meet()
            continue
        if line.version != islands.shared.version + 1:
            raise ValueError(
                f"version {line.version} follows version {islands.shared.version} in the log: it "
                "is of a training that continued from a checkpoint, or incomplete."
            )
        records = zip(line.began, line.weights, line.steps)
        islands.merge([_again(islands, history, *x) for x in zip(line.islands, records)])
        history[islands.shared.version] = islands.shared
        # Versions that no later line uses are dropped.
        uses.subtract(line.began)
        history = {version: shared for version, shared in history.items() if uses[version] > 0}


def _again(
    islands: InTurn, history: dict[int, SharedParams], island: int, record: tuple[int, float, int]
) -> Contribution:
    """Recomputes a contribution, and compares it with its record."""
    began, weight, step = record
    if version_of(islands.states[island]) != began:
        islands.land(island, history[began], islands.optimizer.mix)
    islands.train(island, lambda number: number == step)
    new = islands.contribution(island)
    # Weights differ by rounding: the replicas of an island add them in another order.
    is_close = isclose(new.weight, weight, rel_tol=1e-5)
    if (new.began, new.step) != (began, step) or not is_close:
        raise ValueError(
            f"island {island} came in the log with step {step} and weight {weight:g}, and now with "
            f"step {new.step} and weight {new.weight:g}: give the loss, the optimizer and the "
            "batches of that training."
        )
    return new
