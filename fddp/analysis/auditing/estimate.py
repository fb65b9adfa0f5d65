"""Estimates how long a scheduled program would take on a machine that is not here, by a model of two resources.

The GPU runs the program's operations one after the other, each for as long as its multiplications or its bytes take at
the chip's peak. The link carries collectives in the order in which they start, each for as long as a ring takes. An
operation that needs a collective waits for it. Launches, caches and the traffic's share of the GPU are left out: a real
step is slower on both sides, and the estimate is for comparing schedules, not for promising milliseconds.

Source: the pipeline of Li et al. (VLDB 2020), Fig. 4; the roofline model.
"""

from fddp.analysis.auditing.targets import Target
from fddp.hlo import Collective, Computation, Instruction, Module, sends, traffic, work
from fddp.schedules import Span, Timeline


def estimate(module: Module, collectives: tuple[Collective, ...], target: Target) -> Timeline:
    """Estimates when a step on a target would compute and when it would communicate.

    Args:
      module: the scheduled program; a loop or a conditional in it is one operation, with what it sends unseen.
      collectives: its collectives.
      target: the machine.

    Returns:
      A timeline; computation is named after the Python functions it comes from, communication after its number among
      `collectives`.
    """
    seen = {k: collective for k, collective in enumerate(collectives) if not collective.inside}
    starts = {one.start: k for k, one in seen.items()}
    dones = {one.done: k for k, one in seen.items()}
    clock = link = 0.0
    landed: dict[int, float] = {}
    spans: list[Span] = []
    for at, (line, computation) in enumerate(next(module.schedules()).lines):
        if at in starts:
            collective = collectives[starts[at]]
            begin = max(clock, link)
            landed[starts[at]] = link = begin + target.seconds(collective.kind, collective.nbytes)
            spans.append(Span("communication", str(starts[at]), begin, link, collective.nbytes))
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
