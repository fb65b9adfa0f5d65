"""The cost of a step on one replica: against a step by hand, and packing against a copy of as
many bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

import fddp
from bench.on_gpu.machine import Machine
from bench.overhead import measure
from bench.record import interleave, ratio
from bench.workload import read
from fddp.buckets.packing import pack, unpack


def measures_of_steps(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Times a step of each model, and the same by hand."""
    return {
        name: lambda name=name: measure(read(name), rounds=machine.rounds) for name in machine.timed
    }


def tell_steps(figures: dict[str, Any]) -> str:
    """The figures in words."""
    time = figures["fddp / by hand"]
    return (
        f"{time['median']:.3f} ({time['quartile_1']:.3f} … {time['quartile_3']:.3f}) of a step by "
        f"hand, "
        f"which takes {figures['by hand']['median_ms']:.2f} ms; "
        f"{figures['extra_memory_in_gradients']:+.2f} copies of the gradients in memory"
    )


def measures_of_packing(machine: Machine) -> dict[str, Callable[[], dict[str, Any]]]:
    """Times packing for each model."""
    return {name: partial(packing, name, machine) for name in machine.timed}


def packing(name: str, machine: Machine) -> dict[str, Any]:
    """Times packing and unpacking a model's gradients, and a copy of the buckets, in turn."""
    params = read(name).params
    plan = fddp.make_plan(params)
    packed = jax.jit(lambda tree: pack(plan, tree))
    buckets = packed(params)
    opened = jax.jit(lambda buckets: unpack(plan, buckets))
    # Adding a number that is not known beforehand: XLA would hand a mere copy through.
    copied = jax.jit(lambda tree, zero: jax.tree.map(lambda x: x + zero.astype(x.dtype), tree))
    zero = jax.numpy.zeros(())
    runs = {
        "copy": lambda: copied(buckets, zero),
        "pack": lambda: packed(params),
        "unpack": lambda: opened(buckets),
    }
    seconds = interleave(runs, rounds=2 * machine.rounds)
    nbytes = sum(bucket.nbytes for bucket in plan.buckets)
    rate = 2 * nbytes / float(np.median(seconds["copy"]))
    equal = all(map(np.array_equal, jax.tree.leaves(opened(buckets)), jax.tree.leaves(params)))
    return {
        "MiB": nbytes / 2**20,
        "buckets": len(plan.buckets),
        "copy_bytes_per_s": rate,
        **{f"{way}_us": 1e6 * float(np.median(values)) for way, values in seconds.items()},
        **{f"{way} / copy": ratio(seconds[way], seconds["copy"]) for way in ("pack", "unpack")},
        **({} if equal else {"wrong": "what was unpacked is not what was packed"}),
    }


def tell_packing(figures: dict[str, Any]) -> str:
    """The figures in words."""
    return (
        f"{figures['MiB']:.1f} MiB in {figures['buckets']} buckets: packing takes "
        f"{figures['pack / copy']['median']:.2f} and unpacking "
        f"{figures['unpack / copy']['median']:.2f} of a copy, "
        f"which moves {figures['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    )
