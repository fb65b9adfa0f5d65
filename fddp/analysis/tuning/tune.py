"""Finds the best bucket cap: measured on these hosts, or estimated for GPUs that are not here."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import optax

from fddp.analysis.tuning.for_target import CAPS_MB, Choice, tune_for
from fddp.analysis.tuning.search import Tuning, tune_here
from fddp.buckets import Caps
from fddp.jax_internals import without_context_mesh
from fddp.training import TrainStep

ARGUMENTS = ("loss_fn", "optimizer", "params", "batch")  # without a target


@overload
def tune(step: TrainStep, state: Any, batch: Any, *, target: str, caps_mb: Sequence[Caps] = CAPS_MB) -> Choice: ...


@overload
def tune(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, params: Any, batch: Any, **options: Any
) -> Tuning: ...


def tune(*given: Any, target: str | None = None, **options: Any) -> Any:
    """Finds the bucket cap with the shortest step.

    `fddp.tune(loss_fn, optimizer, params, batch)` measures the hosts that it runs on, under the staged schedule, and
    whether eager is faster still; see `fddp.analysis.tuning.search`. `fddp.tune(step, state, batch, target="h100:2x8")`
    compiles a fused step with a few caps for GPUs that need not be here, and compares what `fddp.audit` estimates.

    Args:
      *given: the arguments of `train_step`, the parameters, and this process's rows; or, with a target, a step, its
        state and a batch, as for `fddp.audit`.
      target: None: these hosts. "h100:8", "a100:2x8": as for `fddp.audit`.
      **options: `caps_mb`, the caps to choose from, MiB. Without a target also `group`, `has_aux`, `model_state` and
        `rng`, `steps`, of each of the three turns of a measurement, and further options of `train_step`; with
        schedule="staged" eager is not tried.

    Returns:
      A `Tuning`; `train_step(…, bucket_cap_mb=tuning.bucket_cap_mb, schedule=tuning.schedule)` uses it. With a target a
      `Choice`, whose `step` goes on from the state. All ranks get the same.

    Raises:
      ValueError: no caps; an unknown target, or a schedule of several programs for it; without one several replicas per
        process, or another schedule than staged.
      TypeError: a target without a step, or a step without a target.
      RuntimeError: the compiler for the target is not installed.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
      >>> params = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))}
      >>> tuning = fddp.tune(loss, optax.sgd(0.1), params, jnp.ones((2, 4)), group=group, caps_mb=[0, 0.25], steps=1)
      >>> [(c.bucket_cap_mb, len(c.nbytes)) for c in tuning.candidates]
      [(0, 2), (0.25, 1)]
    """
    step = given[0] if given else options.get("step")
    missing = [name for name in ARGUMENTS[len(given) :] if name not in options and target is None]
    if missing or isinstance(step, TrainStep) != (target is not None):
        raise TypeError(
            "fddp.tune(step, state, batch, target='h100:8') takes a step and a target to compile it for, and "
            "fddp.tune(loss_fn, optimizer, params, batch), which measures on these hosts, takes neither: got "
            f"{type(step).__name__} and target={target!r}."
        )
    find: Any = tune_here if target is None else partial(tune_for, target=target)
    return without_context_mesh(find)(*given, **options)
