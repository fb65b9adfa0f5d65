"""Islands that do not wait, on one device: what they would do at given speeds, and what they have done, once more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from fddp.comm import mesh_group, replica_mesh
from fddp.local_training import (
    InTurn,
    Island,
    Islands,
    first_shared,
    islands,
    merging_of,
    on_this_host,
    read_log,
    replay,
    simulate,
)
from fddp.losses import check_callable, make_objective
from fddp.optim import LocalSteps
from fddp.step import WHOLE, OptionArguments, Replica, name_of, read_options, with_trained
from fddp.training.train_step import TrainStep
from fddp.training.update import updated


def simulate_islands(
    loss_fn: Callable[..., Any],
    optimizer: LocalSteps,
    params: Any,
    batches: Sequence[Iterable[Any]],
    *,
    seconds: Callable[[int, int], float],
    model_state: Any = None,
    rng: Any = None,
    has_aux: bool = False,
    **options: Unpack[OptionArguments],
) -> Islands:
    """Trains islands that do not wait for each other on one device, with given seconds in place of a clock.

    Args:
      loss_fn: as for `train_step`.
      optimizer: made by `local_steps` with a quorum; the replicas of an island come one after the other.
      params: the first parameters, of all islands.
      batches: those of each island, of all of its replicas; so many islands there are.
      seconds: (island, number of the step, from 1) → the seconds that the step takes; merging takes none.
      model_state: as for `step.init`.
      rng: likewise.
      has_aux: as for `train_step`.
      **options: likewise.

    Returns:
      The shared parameters, the islands' states and the order of the merges, once all islands have met.

    Raises:
      ValueError: the optimizer has no quorum, or one of more islands than there are; or it has `start`.
      TypeError: as `train_step`.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> optimizer = fddp.local_steps(optax.sgd(0.25), quorum=1)
      >>> batches = [[jnp.full(8, 2.0)] * 2, [jnp.full(8, 4.0)]]  # the second island is three times slower
      >>> done = fddp.simulate_islands(
      ...     lambda w, x: jnp.mean((x - w) ** 2),
      ...     optimizer,
      ...     jnp.zeros(()),
      ...     batches,
      ...     seconds=lambda island, number: 3.0 if island else 1.0,
      ... )
      >>> [(line.islands, line.began) for line in done.log[:-1]], float(done.params)
      ([((0,), (0,)), ((0,), (1,)), ((1,), (0,))], 3.5)
    """
    made = _in_turn("simulate_islands", loss_fn, optimizer, params, batches, model_state, rng, has_aux, options)
    rule: Any = optimizer.quorum
    simulate(made, rule, seconds)
    return _result(made, params)


def replay_islands(
    log: str | Path | Sequence[Any],
    loss_fn: Callable[..., Any],
    optimizer: LocalSteps,
    params: Any,
    batches: Sequence[Iterable[Any]],
    *,
    model_state: Any = None,
    rng: Any = None,
    has_aux: bool = False,
    **options: Unpack[OptionArguments],
) -> Islands:
    """Makes an asynchronous training again on one device, in the order in which its log has merges.

    Islands of one replica have the same bits again; of several replicas the sums are rounded in another order.

    Args:
      log: the file that `local_steps(log=)` named, or `Islands.log`.
      loss_fn: that of the training, as all that follows.
      optimizer: made by `local_steps` with a quorum.
      params: the first parameters.
      batches: those of each island: the rows of its replicas, in order of rank.
      model_state: as for `step.init`.
      rng: likewise.
      has_aux: as for `train_step`.
      **options: likewise.

    Returns:
      The shared parameters, the islands' states and the order of the merges.

    Raises:
      ValueError: the log is of another training; or one device cannot make it again.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> given = (
      ...     lambda w, x: jnp.mean((x - w) ** 2),
      ...     fddp.local_steps(optax.sgd(0.25), quorum=1),
      ...     jnp.zeros(()),
      ...     [[jnp.full(8, 2.0)] * 2, [jnp.full(8, 4.0)]],
      ... )
      >>> done = fddp.simulate_islands(*given, seconds=lambda island, number: 3.0 if island else 1.0)
      >>> float(fddp.replay_islands(done.log, *given).params)
      3.5
    """
    if rng is not None and isinstance(optimizer, LocalSteps) and optimizer.island != 1:
        raise ValueError(
            f"replay_islands: each replica of an island draws random numbers of its own, and one device draws others: "
            f"it can make islands of one replica again with rng=, and others without; got island={optimizer.island!r}."
        )
    made = _in_turn("replay_islands", loss_fn, optimizer, params, batches, model_state, rng, has_aux, options)
    replay(made, read_log(log))
    return _result(made, params)


def _in_turn(
    call: str,
    loss_fn: Callable[..., Any],
    optimizer: LocalSteps,
    params: Any,
    batches: Sequence[Iterable[Any]],
    model_state: Any,
    rng: Any,
    has_aux: bool,
    options: Any,
) -> InTurn:
    """Makes islands at their beginning."""
    check_callable(call, "loss_fn", loss_fn)
    if not isinstance(optimizer, LocalSteps) or optimizer.quorum is None:
        raise ValueError(f"{call}: optimizer must be one of fddp.local_steps with a quorum, got {optimizer!r}.")
    if optimizer.island == "node":
        raise ValueError(f"{call}: one device has no nodes: give local_steps the number of replicas, island=k.")
    if optimizer.start:
        raise ValueError(
            f"{call}: the first {optimizer.start} steps are of all islands together, which is no matter of order: give "
            "the parameters that they have made, and start=0."
        )
    optimizer.among(len(batches))
    group = mesh_group(replica_mesh(jax.local_devices()[:1]))
    objective = make_objective(loss_fn, has_aux=has_aux)
    given = read_options(call, options)
    # The replicas of an island come one after the other, as micro-batches do.
    settings = replace(given, accumulation_steps=given.accumulation_steps * optimizer.island)
    replica = Replica(objective, group, settings, islands(optimizer, WHOLE, None), loss=name_of(loss_fn))

    def step(island: int) -> TrainStep:
        # An island draws the random numbers of its rank.
        comm = replace(group.communicator, replica_index=lambda: jnp.int32(island))
        own = replace(replica, group=replace(group, communicator=comm))
        return TrainStep(own, optimizer, partial(updated, optimizer.inner))

    steps = [step(0)] * len(batches) if rng is None else [step(island) for island in range(len(batches))]
    states = [one.init(params, model_state=model_state, rng=rng) for one in steps]
    rows = [iter(one) for one in batches]
    numbered = [Island(replica, number, (0,), group) for number in range(len(rows))]
    trained = replica.trained(params)
    merging = on_this_host(merging_of(optimizer, trained))
    return InTurn(optimizer, numbered, steps, merging, first_shared(optimizer, trained), states, rows)


def _result(made: InTurn, params: Any) -> Islands:
    """The islands' result; what is not trained is as it was."""
    tree = jax.tree.structure(made.islands[0].replica.trained(params))
    shared = with_trained(params, tree.unflatten(made.shared.params))
    return Islands(shared, tuple(made.states), tuple(made.log))
