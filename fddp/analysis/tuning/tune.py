"""Finds the best bucket cap: measured on these hosts, or estimated for GPUs not attached."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import optax
from jaxtyping import PyTree

from fddp.analysis.tuning.for_target import CAPS_MB, Choice, tune_for
from fddp.analysis.tuning.search import Tuning, tune_here
from fddp.analysis.workload import make_workload
from fddp.buckets import Caps
from fddp.jax_internals import without_context_mesh
from fddp.runtime import group_of
from fddp.step import TrainState
from fddp.training import TrainStep

ARGUMENTS = ("loss_fn", "optimizer", "params", "batch")  # without a target


@overload
def tune(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    *,
    target: str,
    caps_mb: Sequence[Caps] = CAPS_MB,
) -> Choice: ...


@overload
def tune(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    params: PyTree,
    batch: PyTree,
    **options: Any,
) -> Tuning: ...


def tune(*args: Any, target: str | None = None, **options: Any) -> Any:
    """Finds the bucket cap with the shortest step.

    `fddp.tune(loss_fn, optimizer, params, batch)` measures the hosts of the running processes: the
    caps under the staged schedule, and then the eager schedule with the best cap; see
    `fddp.analysis.tuning.search`. `fddp.tune(step, state, batch, target="h100:2x8")` compiles a
    fused step with several caps for GPUs that need not be attached, and compares the estimates of
    `fddp.audit`.

    Args:
      *args: loss, optimizer, parameters and this process's rows, as for `train_step`. With a
        target: a step, its state and a batch, as for `fddp.audit`.
      target: "h100:8" or "a100:2x8", as for `fddp.audit`; None for these hosts.
      **options: `caps_mb`, the candidate caps in MiB. Without a target also `group`, `has_aux`,
        `model_state` and `rng`; `steps`, the steps in each of the three turns of a measurement; and
        further options of `train_step`. With schedule="staged" the eager schedule is not tried.

    Returns:
      A `Tuning`; `train_step(…, bucket_cap_mb=tuning.bucket_cap_mb, schedule=tuning.schedule)` uses
      it. With a target a `Choice`; its `step` continues from the state. Equal on all ranks.

    Raises:
      ValueError: no caps; an unknown target, or a schedule of several programs for a target.
        Without a target: several replicas per process, or a schedule other than "auto" or "staged".
      TypeError: a target without a step, or a step without a target.
      RuntimeError: the compiler for the target is not installed.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
      >>> params = {"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))}
      >>> arguments = loss, optax.sgd(0.1), params, jnp.ones((2, 4))
      >>> tuning = fddp.tune(*arguments, group=group, caps_mb=[0, 0.25], steps=1)
      >>> [(c.bucket_cap_mb, len(c.nbytes)) for c in tuning.candidates]
      [(0, 2), (0.25, 1)]
    """
    step = [*args, options.get("step")][0]
    missing = [name for name in ARGUMENTS[len(args) :] if name not in options and target is None]
    if missing or isinstance(step, TrainStep) != (target is not None):
        raise TypeError(
            "fddp.tune(step, state, batch, target='h100:8') takes a step and a target to compile "
            "it for, and fddp.tune(loss_fn, optimizer, params, batch), which measures on these "
            f"hosts, takes neither: got {type(step).__name__} and target={target!r}."
        )
    if target is None:
        return without_context_mesh(tune_here)(*args, **options)
    return without_context_mesh(tune_for)(*args, target=target, **options)


def tune_model(name: str, rows: int = 8, **options: Any) -> Tuning:
    """Tunes the model module:preset with SGD and `rows` synthetic rows per process."""
    group = group_of("tune_model", options.pop("group", None))
    loss_fn, params, model_state, batch = make_workload(name, rows, group.rank)
    options |= {"group": group, "has_aux": True, "model_state": model_state}
    return tune_here(loss_fn, optax.sgd(1e-3), params, batch, **options)
