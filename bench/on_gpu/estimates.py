"""The ratio of a step's time to the estimate of `fddp.audit`, for the program of this machine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import optax

from bench.on_gpu.machine import Machine
from bench.record import interleave, summary
from bench.workload import read
from fddp.analysis.auditing.estimate import estimate
from fddp.analysis.auditing.targets import read_target
from fddp.hlo import find_collectives, parse, work


def measures(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Times each model and estimates the program that ran."""
    return {name: partial(compare, name, machine) for name in machine.timed}


def compare(name: str, machine: Machine) -> dict[str, Any]:
    """Times a fused step, and estimates its program at the chip's peak rates, if fddp knows
    them."""
    workload = read(name)
    step, state = workload.step(optax.adamw(1e-3))

    def run() -> Any:
        nonlocal state
        state, info = step(state, workload.batch)
        return state, info

    seconds = interleave({"step": run}, rounds=machine.rounds)["step"]
    measured = {"chip": machine.chip, **summary(seconds)}
    if machine.chip is None:
        return measured
    module = parse(step.lower(state, workload.batch).compile().as_text() or "")
    line = estimate(module, find_collectives(module), read_target(f"{machine.chip}:1"))
    flops = sum(
        operation.flops
        for at, inside in next(module.schedules()).lines
        for operation in work(module, at, inside)
    )
    return measured | {
        "estimated_ms": 1e3 * line.seconds,
        "measured / estimated": float(np.median(seconds)) / line.seconds,
        "GFLOP": flops / 1e9,
        **(
            {}
            if line.seconds > 0 and flops > 0
            else {"wrong": "no product was found in the compiled program"}
        ),
    }


def tell(figures: dict[str, Any]) -> str:
    """The figures in words."""
    measured = f"{figures['median_ms']:.2f} ms measured"
    if "estimated_ms" not in figures:
        return f"{measured}; fddp knows no peak rates of this GPU"
    return (
        f"{measured}, {figures['estimated_ms']:.3f} estimated at the peak rates of "
        f"{figures['chip']} "
        f"({figures['measured / estimated']:.2f} times), {figures['GFLOP']:.1f} GFLOP"
    )
