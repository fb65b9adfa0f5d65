"""Estimates the duration of a scheduled program on a machine, by a model of two resources.

The GPU runs the program's operations one after another. Each takes the time of its multiplications
or of its bytes at the chip's peak, whichever is longer. The link carries collectives in the order
of their starts. Each takes the time of its slowest group: by NVLink inside a host, over the network
between hosts. An operation waits for the collectives that it reads. A loop with collectives runs
round by round; any other loop is one operation.

The model ignores launches and caches. It also ignores traffic's share of the GPU's memory bandwidth
and multiprocessors, since NCCL chooses it. A real step computes and sends more slowly: the estimate
compares schedules, and does not promise milliseconds.

Source: the pipeline of Li et al. (VLDB 2020), Fig. 4; the roofline model.
"""

from collections.abc import Sequence
from functools import cache
from itertools import chain

from fddp.analysis.auditing.targets import Target
from fddp.hlo import Collective, Computation, Instruction, Module, sends, traffic, work
from fddp.schedules import Span, Timeline


def estimate(module: Module, collectives: Sequence[Collective], target: Target) -> Timeline:
    """Estimates the timeline of a scheduled program on a target.

    Names of computations are paths of Python functions; names of communications are indices of
    `collectives`. A loop with collectives has spans for each round. A conditional is one operation,
    without its collectives.
    """
    machine = _Machine(module, collectives, target)
    machine.run(module.entry)
    return Timeline(tuple(machine.spans))


class _Machine:
    """A GPU and its link during a program."""

    def __init__(self, module: Module, collectives: Sequence[Collective], target: Target) -> None:
        lines = chain.from_iterable(schedule.lines for schedule in module.schedules())
        starts = [line.name for line, _ in lines if sends(module, line)]
        self._module = module
        self._target = target
        self._collectives = dict(zip(starts, enumerate(collectives)))
        self._clock = 0.0  # the GPU's time
        self._link = 0.0  # end of the link's last collective
        # Arrival time of each collective, by the name of its start.
        self._back = dict[str, float]()
        self._looping = cache(self._sends_in_rounds)
        self._costs = dict[str, float]()
        self.spans = list[Span]()

    def run(self, name: str) -> None:
        """Runs a computation once, by its name."""
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
            message = collective.kind, collective.nbytes, collective.devices
            self._costs[line.name] = self._target.seconds(*message)
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
        """Returns True if a computation starts a collective, also in inner loops."""
        for line, _ in self._module.lines(name):
            loops = line.opcode == "while" and any(map(self._looping, line.calls))
            if loops or sends(self._module, line):
                return True
        return False


def _seconds(module: Module, line: Instruction, computation: Computation, target: Target) -> float:
    if line.opcode == "while":
        inner = chain.from_iterable(map(module.lines, line.calls))
        return line.trips * sum(_seconds(module, *pair, target) for pair in inner)
    works = work(module, line, computation)
    products = sum(product.flops / target.chip.flops_per_s(product.dtype) for product in works)
    return max(products, traffic(module, line, computation) / target.chip.memory_bytes_per_s)
