"""Estimates how long a scheduled program would take on a machine that is not here, by a model of two resources.

The GPU runs the program's operations one after the other, each for as long as its multiplications or its bytes take at
the chip's peak. The link carries collectives in the order in which they start, each for as long as its slowest group
takes: by NVLink inside of a host, over the network between hosts. An operation that needs a collective waits for it. A
loop with collectives runs round by round; any other is one operation of all its rounds. Launches and caches are left
out, and that traffic takes a share of the GPU's memory bandwidth and of its multiprocessors, which NCCL chooses. A real
step is slower on both sides: the estimate is for comparing schedules, not for promising milliseconds.

Source: the pipeline of Li et al. (VLDB 2020), Fig. 4; the roofline model.
"""

from collections.abc import Sequence
from functools import cache
from itertools import count

from fddp.analysis.auditing.targets import Target
from fddp.hlo import Collective, Computation, Instruction, Module, sends, traffic, work
from fddp.schedules import Span, Timeline


def estimate(module: Module, collectives: Sequence[Collective], target: Target) -> Timeline:
    """Estimates when a step on a target would compute and when it would communicate.

    Args:
      module: the scheduled program; a conditional in it is one operation, with what it sends unseen.
      collectives: its collectives.
      target: the machine.

    Returns:
      A timeline; computation is named after the Python functions it comes from, communication after its number among
      `collectives`. What a loop sends and computes is there once for each round.
    """
    machine = _Machine(module, collectives, target)
    machine.run(module.entry)
    return Timeline(tuple(machine.spans))


class _Machine:
    """A GPU and its link on their way through a program."""

    def __init__(self, module: Module, collectives: Sequence[Collective], target: Target) -> None:
        numbers = count()
        started = (line.name for one in module.schedules() for line, _ in one.lines if sends(module, line))
        self._module = module
        self._target = target
        self._collectives = {name: (next(numbers), collective) for name, collective in zip(started, collectives)}
        self._clock = 0.0  # of the GPU
        self._link = 0.0  # when it is free
        self._back = dict[str, float]()  # by the name of what started a collective: when it has arrived
        self._looping = cache(self._sends_in_rounds)
        self._costs = dict[str, float]()
        self.spans = list[Span]()

    def run(self, name: str) -> None:
        """Runs a computation once."""
        for line, computation in self._module.lines(name):
            if line.name in self._collectives:
                self._send(line)
            elif line.opcode.endswith("-done") and line.operands[0] in self._back:
                self._clock = max(self._clock, self._back[line.operands[0]])
            elif line.opcode == "while" and any(map(self._looping, line.calls)):
                for _ in range(line.trips):
                    for called in line.calls:
                        self.run(called)
            elif not sends(self._module, line):
                self._compute(line, computation)

    def _send(self, line: Instruction) -> None:
        number, collective = self._collectives[line.name]
        if line.name not in self._costs:
            sent = collective.kind, collective.nbytes, collective.devices
            self._costs[line.name] = self._target.seconds(*sent)
        begin = max(self._clock, self._link)
        self._link = begin + self._costs[line.name]
        self._back[line.name] = self._link
        self.spans.append(Span("communication", str(number), begin, self._link, collective.nbytes))
        if not collective.asynchronous:
            self._clock = self._link

    def _compute(self, line: Instruction, computation: Computation) -> None:
        if line.name not in self._costs:
            self._costs[line.name] = _seconds(self._module, line, computation, self._target)
        if seconds := self._costs[line.name]:
            end = self._clock + seconds
            self.spans.append(Span("compute", line.op_name or line.name, self._clock, end))
            self._clock = end

    def _sends_in_rounds(self, name: str) -> bool:
        """Whether a computation sends, in loops of its own too."""
        return any(
            sends(self._module, line) or (line.opcode == "while" and any(map(self._looping, line.calls)))
            for line, _ in self._module.lines(name)
        )


def _seconds(module: Module, line: Instruction, computation: Computation, target: Target) -> float:
    if line.opcode == "while":
        inside = (each for called in line.calls for each in module.lines(called))
        return line.trips * sum(_seconds(module, one, body, target) for one, body in inside)
    products = sum(one.flops / target.chip.flops_per_s(one.dtype) for one in work(module, line, computation))
    return max(products, traffic(module, line, computation) / target.chip.memory_bytes_per_s)
