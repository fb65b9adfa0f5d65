"""How long a scheduled program would take on a machine that is not here, by a model of two resources.

The GPU runs the program's operations one after the other, each for as long as its multiplications or its bytes take at
the chip's peak; the link carries all-reduces in the order in which they start, each as long as a ring takes. What waits
for an all-reduce waits. Launches, caches and what traffic takes of the GPU are left out: a real step is slower on both
sides, and the estimate is for comparing schedules, not for promising milliseconds.

Source: the pipeline of Li et al. (VLDB 2020), Fig. 4; the roofline model.
"""

from fddp.compiled.effort import traffic, work
from fddp.compiled.flights import Flight, sends
from fddp.compiled.hlo import Computation, Instruction, Module
from fddp.compiled.targets import Target
from fddp.timeline import Span, Timeline


def estimate(module: Module, flights: tuple[Flight, ...], target: Target) -> Timeline:
    """Estimates when a step on a target would compute and when it would communicate.

    Args:
      module: the scheduled program; a loop in it counts as one operation, with what it sends unseen.
      flights: its collectives.
      target: the machine.

    Returns:
      A timeline; computation is named after the Python functions it comes from, communication after its number among
      `flights`.
    """
    starts = {flight.start: k for k, flight in enumerate(flights) if flight.loops == 0}
    dones = {flight.done: k for k, flight in enumerate(flights) if flight.loops == 0}
    clock = link = 0.0
    landed: dict[int, float] = {}
    spans: list[Span] = []
    for at, (line, computation) in enumerate(next(module.schedules()).lines):
        if at in starts:
            begin, link = max(clock, link), max(clock, link) + target.all_reduce_seconds(flights[starts[at]].nbytes)
            landed[starts[at]] = link
            spans.append(Span("communication", str(starts[at]), begin, link, flights[starts[at]].nbytes))
        elif not sends(module, line):
            seconds = _seconds(module, line, computation, target)
            if seconds:
                spans.append(Span("compute", line.op_name or line.name, clock, clock + seconds))
            clock += seconds
        if at in dones:
            clock = max(clock, landed[dones[at]])
    return Timeline(tuple(spans))


def _seconds(module: Module, line: Instruction, computation: Computation, target: Target) -> float:
    products = sum(one.flops / target.chip.flops_per_s(one.dtype) for one in work(module, line, computation))
    return max(products, traffic(module, line, computation) / target.chip.memory_bytes_per_s)
