"""Tests if training gives equal bits on different numbers of replicas.

The promise of virtual replicas rests on a condition outside fddp: a compiled program must give
equal bits at each call. XLA:CPU does not promise that with more than one thread (jax#39741).

Source: `bitwise reproducibility` in Levanter; thinking machines' count of distinct completions.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.analysis.workload import OPTIMIZER, Workload, find_workload
from fddp.comm import mesh_group

CALLS = 50
ONE_THREAD = (
    "XLA:CPU may add in a different order with more than one thread (jax#39741): "
    "NPROC=1 gives it one."
)
BATCHES = 4


class Reproduction(NamedTuple):
    """The digests of several runs; `print` shows them."""

    model: str
    steps: int
    virtual: int
    digests: tuple[tuple[int, str], ...]
    """Number of replicas, and the digest of the last state and all losses."""
    distinct: int
    """Number of bitwise different results in `CALLS` calls of one program."""

    @property
    def equal(self) -> bool:
        """True if the bits are equal on all numbers of replicas, and at each call."""
        return self.distinct == 1 and len({digest for _, digest in self.digests}) == 1

    def __str__(self) -> str:
        head = f"{self.model}, {self.steps} steps of {self.virtual} virtual replicas, {OPTIMIZER}"
        rows = [f"{n} replica{'s' * (n > 1):<2}  {digest}" for n, digest in self.digests]
        foot = "different"
        if self.equal:
            foot = "equal"
        if self.distinct > 1:
            calls = f"{CALLS} calls of one program gave {self.distinct} results"
            foot = f"no claim: {calls}. {ONE_THREAD}"
        return "\n".join([head, *rows, foot])


def reproduce(name: str, steps: int, replicas: Sequence[int], rows: int | None) -> Reproduction:
    """Trains a workload on several numbers of this process's devices.

    The number of virtual replicas, of `rows` rows each, is the least common multiple of `replicas`.
    """
    if max(replicas) > jax.local_device_count():
        raise ValueError(
            f"{max(replicas)} replicas need as many devices, and this process has "
            f"{jax.local_device_count()}."
        )
    virtual = int(np.lcm.reduce(replicas))
    make = find_workload(name)
    workload, *others = [make(rows, virtual, seed=k) for k in range(BATCHES)]
    batches = [workload.batch, *(x.batch for x in others)]

    def digest(count: int) -> str:
        devices = jax.local_devices()[:count]
        group = mesh_group(jax.make_mesh((count,), ("replica",), devices=devices))
        step = workload.step(group, virtual_replicas=virtual)
        state = workload.init(step)
        losses = []
        for k in range(steps):
            state, info = step(state, batches[k % BATCHES])
            losses.append(info.loss)
        return _digest((state, losses))

    digests = tuple((count, digest(count)) for count in replicas)
    results = distinct(_gradient(workload, virtual), workload.params)
    return Reproduction(name, steps, virtual, digests, results)


def distinct(f: Callable[..., Any], *args: Any) -> int:
    """Counts the bitwise different results of `CALLS` calls of a compiled function."""
    return len({_digest(f(*args)) for _ in range(CALLS)})


def small_gradient() -> int:
    """Counts the bitwise different gradients of a small net with products for several threads."""
    workload = find_workload("mlp")(256)
    return distinct(_gradient(workload, 1), workload.params)


def _gradient(workload: Workload, replicas: int) -> Callable[..., Any]:
    """Compiles the gradient of the loss on the first replica's rows."""
    batch = jax.tree.map(lambda x: x[: len(x) // replicas], workload.batch)
    loss = workload.loss_fn
    if workload.model_state is not None:
        loss = partial(loss, model_state=workload.model_state)
    return jax.jit(jax.grad(lambda params: jax.tree.leaves(loss(params, batch))[0]))


def _digest(tree: PyTree) -> str:
    leaves = map(np.asarray, jax.device_get(jax.tree.leaves(tree)))
    data = b"".join(x.tobytes() for x in leaves)
    return hashlib.sha256(data).hexdigest()[:16]
