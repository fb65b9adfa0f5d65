"""The cost of a step on one replica, against a step by hand."""

from collections.abc import Callable
from typing import Any

from bench.on_gpu.machine import Machine
from bench.overhead import measure
from bench.workload import read


def measures(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Times a step of each model, and the same by hand."""
    return {
        name: lambda name=name: measure(read(name), rounds=machine.rounds) for name in machine.timed
    }


def tell(figures: dict[str, Any]) -> str:
    """The figures in words."""
    time = figures["fddp / by hand"]
    return (
        f"{time['median']:.3f} ({time['quartile_1']:.3f} … {time['quartile_3']:.3f}) of a step by "
        f"hand, "
        f"which takes {figures['by hand']['median_ms']:.2f} ms; "
        f"{figures['extra_memory_in_gradients']:+.2f} copies of the gradients in memory"
    )
