"""Finds the best bucket cap: measured on these hosts, or estimated for GPUs not attached."""

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec

from jaxtyping import PyTree

from fddp.analysis.tuning import for_target, search
from fddp.analysis.tuning.tuning import Tuning
from fddp.buckets import Caps
from fddp.jax_internals import without_context_mesh
from fddp.step import TrainState, check_step
from fddp.training import TrainStep, train_step

Args = ParamSpec("Args")


def _also_of_a_loss(tune: Callable[Args, Tuning]) -> Callable[Args, Tuning]:
    """Adds the deprecated form `fddp.tune(loss_fn, optimizer, params, batch)`."""

    def of_loss(loss_fn: Any, optimizer: Any, params: Any, batch: Any, **options: Any) -> Tuning:
        def taken(*names: str) -> dict[str, Any]:
            return {name: options.pop(name) for name in names if name in options}

        untyped: Any = tune
        start = taken("model_state", "rng")
        search_options = taken("caps_mb", "steps")
        step = train_step(loss_fn, optimizer, **options)
        return untyped(step, step.init(params, **start), batch, **search_options)

    @wraps(tune)
    def either(*args: Any, **options: Any) -> Tuning:
        loss_fn, optimizer, *_ = (*args, None, None)
        if "loss_fn" not in options:
            optimizer = options.get("optimizer", optimizer)
            if isinstance(loss_fn, TrainStep) or not hasattr(optimizer, "init"):
                return tune(*args, **options)
        warnings.warn(
            "fddp.tune(loss_fn, optimizer, params, batch) is deprecated: call fddp.tune(step, "
            "state, batch) with step = fddp.train_step(loss_fn, optimizer) and "
            "state = step.init(params).",
            DeprecationWarning,
            stacklevel=2,
        )
        return of_loss(*args, **options)

    return either


@_also_of_a_loss
@without_context_mesh
def tune(
    step: TrainStep,
    state: TrainState,
    batch: PyTree,
    target: str | None = None,
    *,
    caps_mb: Sequence[Caps] | None = None,
    steps: int = 4,
) -> Tuning:
    """Finds the bucket cap and the schedule with the shortest step.

    Without a target it measures on the hosts of the running processes: it predicts a staged step
    for each cap, measures the best, and alternates it with the eager schedule. With a target it
    compiles a step of one program under three schedules and a few caps, and compares the estimates
    of `fddp.audit`. The form `fddp.tune(loss_fn, optimizer, params, batch)` is deprecated.

    Args:
      step: from `train_step`. With schedule="staged" the eager schedule is not tried.
      state: from `step.init` or the last step; it is copied. With a target also from `step.shapes`.
      batch: this process's rows; with a target the rows of all replicas, or their shapes.
      target: "h100:8" or "a100:2x8", as for `fddp.audit`; None for these hosts.
      caps_mb: the candidate caps in MiB; None: a range of caps from 0 to 200, or a few for a
        target, which also tries the step's own cap.
      steps: steps in each of the three turns of a measurement; a target needs none.

    Returns:
      A `Tuning`, equal on all ranks. Its `step` continues from the state;
      `train_step(…, bucket_cap_mb=tuning.bucket_cap_mb, schedule=tuning.schedule)` uses the result
      in the next run.

    Raises:
      ValueError: no caps; an unknown target, or a schedule of several programs for a target.
        Without a target: several replicas per process, or a schedule other than "auto" or "staged".
      TypeError: `step` is not a step, or `state` not a state.
      RuntimeError: the compiler for the target is not installed.

    Example:
      >>> import jax, fddp, jax.numpy as jnp, optax
      >>> group = fddp.mesh_group(jax.sharding.Mesh(jax.devices()[:1], "replica"))
      >>> loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2)
      >>> step = fddp.train_step(loss, optax.sgd(0.1), group=group)
      >>> state = step.init({"a": jnp.ones((4, 8)), "b": jnp.ones((8, 1))})
      >>> tuning = fddp.tune(step, state, jnp.ones((2, 4)), caps_mb=[0, 0.25], steps=1)
      >>> [(c.bucket_cap_mb, len(c.plan.buckets)) for c in tuning.candidates]
      [(0, 2), (0.25, 1)]
    """
    check_step("fddp.tune", step)
    if target is None:
        caps_mb = search.CAPS_MB if caps_mb is None else caps_mb
        return search.tune_here(step, state, batch, caps_mb=caps_mb, steps=steps)
    caps_mb = for_target.CAPS_MB if caps_mb is None else caps_mb
    return for_target.tune_for(step, state, batch, target, caps_mb=caps_mb)
