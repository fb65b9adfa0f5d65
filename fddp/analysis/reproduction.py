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
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from fddp.analysis.workload import read_model
from fddp.comm import mesh_group
from fddp.training import train_step

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
        head = f"{self.model}, {self.steps} steps of {self.virtual} virtual replicas"
        rows = [f"{n} replica{'s' * (n > 1):<2}  {digest}" for n, digest in self.digests]
        foot = "different"
        if self.equal:
            foot = "equal"
        if self.distinct > 1:
            calls = f"{CALLS} calls of one program gave {self.distinct} results"
            foot = f"no claim: {calls}. {ONE_THREAD}"
        return "\n".join([head, *rows, foot])


def reproduce(model: str | None, steps: int, replicas: Sequence[int], rows: int) -> Reproduction:
    """Trains module:preset (None: a small net) on several numbers of this process's devices.

    The number of virtual replicas, of `rows` rows each, is the least common multiple of `replicas`.
    """
    if max(replicas) > jax.local_device_count():
        raise ValueError(
            f"{max(replicas)} replicas need as many devices, and this process has "
            f"{jax.local_device_count()}."
        )
    virtual = int(np.lcm.reduce(replicas))
    loss_fn, (params, model_state), batches = _problem(model, rows * virtual)

    def digest(count: int) -> str:
        devices = jax.local_devices()[:count]
        group = mesh_group(jax.make_mesh((count,), ("replica",), devices=devices))
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        step = train_step(loss_fn, optimizer, group=group, has_aux=True, virtual_replicas=virtual)
        state = step.init(params, model_state=model_state)
        losses = []
        for k in range(steps):
            state, info = step(state, batches[k % BATCHES])
            losses.append(info.loss)
        return _digest((state, losses))

    micro_batch = jax.tree.map(lambda x: x[:rows], batches[0])
    loss = loss_fn
    if model_state is not None:
        loss = partial(loss_fn, model_state=model_state)
    gradient = jax.jit(jax.grad(lambda p: loss(p, micro_batch)[0]))
    digests = tuple((count, digest(count)) for count in replicas)
    results = distinct(gradient, params)
    return Reproduction(model or "a small net", steps, virtual, digests, results)


def distinct(f: Callable[..., Any], *args: Any) -> int:
    """Counts the bitwise different results of `CALLS` calls of a compiled function."""
    return len({_digest(f(*args)) for _ in range(CALLS)})


def small_gradient() -> int:
    """Counts the bitwise different gradients of a small net with products for several threads."""
    loss_fn, (params, _), batches = _problem(None, 256)
    return distinct(jax.jit(jax.grad(lambda p: loss_fn(p, batches[0])[0])), params)


def _problem(model: str | None, rows: int) -> tuple[Callable[..., Any], tuple[Any, Any], list[Any]]:
    """Returns a loss, its initial parameters and buffers, and several batches."""
    if model is not None:
        module, preset = read_model(model)
        config = module.PRESETS[preset]
        batches = [module.batch(config, rows, seed=k) for k in range(BATCHES)]
        state = module.init(config, jax.random.key(0), batches[0])
        return module.loss_fn(config), state, batches

    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> tuple[Any, Any]:
        return jnp.mean((jnp.tanh(x @ params["hidden"] + params["bias"]) @ params["out"]) ** 2), ()

    draw = np.random.default_rng(0)
    params = {
        "bias": np.zeros(128),
        "hidden": draw.normal(size=(64, 128)) / 8,
        "out": draw.normal(size=(128, 64)) / 11,
    }
    batches = [draw.normal(size=(rows, 64)).astype(np.float32) for _ in range(BATCHES)]
    return loss_fn, (jax.tree.map(np.float32, params), None), batches


def _digest(tree: PyTree) -> str:
    leaves = map(np.asarray, jax.device_get(jax.tree.leaves(tree)))
    data = b"".join(x.tobytes() for x in leaves)
    return hashlib.sha256(data).hexdigest()[:16]
