"""Asynchronous islands on one device: simulated with given step times, or replayed from a log."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.comm import mesh_group, replica_mesh
from fddp.islands.island_runner import islands
from fddp.islands.island_state import Island
from fddp.islands.local_steps import AsyncSteps
from fddp.islands.merge_log import read_log
from fddp.islands.merging import first_shared, merging_of, on_this_host
from fddp.islands.simulation import InTurn, Islands, replay, train_in_order
from fddp.jaxpr import with_trained
from fddp.local_training import LocalSteps
from fddp.losses import check_callable, make_objective
from fddp.step import WHOLE, OptionArguments, Replica, name_of, read_options
from fddp.training import TrainStep, updated


def simulate_islands(
    loss_fn: Callable[..., Any],
    optimizer: LocalSteps,
    params: PyTree,
    batches: Sequence[Iterable[Any]],
    *,
    seconds: Callable[[int, int], float],
    model_state: PyTree = None,
    rng: PyTree = None,
    has_aux: bool = False,
    **options: Unpack[OptionArguments],
) -> Islands:
    """Simulates asynchronous islands on one device, with given step times instead of a clock.

    Args:
      loss_fn: as for `train_step`.
      optimizer: from `local_steps` with a quorum. The replicas of an island are computed one after
        the other.
      params: the first parameters, equal on all islands.
      batches: for each island, its batches with the rows of all its replicas.
      seconds: (island, number of the step, from 1) → duration of that step in seconds. Merges take
        no time.
      model_state: as for `step.init`.
      rng: as for `step.init`.
      has_aux: as for `train_step`.
      **options: as for `train_step`.

    Returns:
      The shared parameters, the islands' states and the order of the merges, after a final
      synchronization.

    Raises:
      ValueError: the optimizer has no quorum, a quorum of too many islands, or `start`.
      TypeError: as for `train_step`.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> optimizer = fddp.local_steps(optax.sgd(0.25), quorum=1)
      >>> batches = [[jnp.full(8, 2.0)] * 2, [jnp.full(8, 4.0)]]
      >>> done = fddp.simulate_islands(
      ...     lambda w, x: jnp.mean((x - w) ** 2),
      ...     optimizer,
      ...     jnp.zeros(()),
      ...     batches,
      ...     seconds=lambda island, number: 3.0 if island else 1.0,  # island 1 is slower
      ... )
      >>> [(line.islands, line.began) for line in done.log[:-1]], float(done.params)
      ([((0,), (0,)), ((0,), (1,)), ((1,), (0,))], 3.5)
    """
    islands_in_turn = _in_turn(
        "simulate_islands", loss_fn, optimizer, params, batches, model_state, rng, has_aux, options
    )
    train_in_order(islands_in_turn, seconds)
    return _result(islands_in_turn, params)


def replay_islands(
    log: str | Path | Sequence[Any],
    loss_fn: Callable[..., Any],
    optimizer: LocalSteps,
    params: PyTree,
    batches: Sequence[Iterable[Any]],
    *,
    model_state: PyTree = None,
    rng: PyTree = None,
    has_aux: bool = False,
    **options: Unpack[OptionArguments],
) -> Islands:
    """Replays an asynchronous training on one device, with the merges in the order of its log.

    Islands of one replica give the same bits. Sums over several replicas are rounded in another
    order.

    Args:
      log: the file of `local_steps(log=)`, or `Islands.log`.
      loss_fn: as in that training, like all further arguments.
      optimizer: from `local_steps` with a quorum.
      params: the first parameters.
      batches: for each island, its batches with the rows of its replicas in order of rank.
      model_state: as for `step.init`.
      rng: as for `step.init`.
      has_aux: as for `train_step`.
      **options: as for `train_step`.

    Returns:
      The shared parameters, the islands' states and the order of the merges.

    Raises:
      ValueError: the log belongs to another training, or one device cannot replay it.

    Example:
      >>> import fddp, jax.numpy as jnp, optax
      >>> training = (
      ...     lambda w, x: jnp.mean((x - w) ** 2),
      ...     fddp.local_steps(optax.sgd(0.25), quorum=1),
      ...     jnp.zeros(()),
      ...     [[jnp.full(8, 2.0)] * 2, [jnp.full(8, 4.0)]],
      ... )
      >>> done = fddp.simulate_islands(*training, seconds=lambda island, number: 1.0 + 2 * island)
      >>> float(fddp.replay_islands(done.log, *training).params)
      3.5
    """
    if rng is not None and isinstance(optimizer, LocalSteps) and optimizer.island != 1:
        raise ValueError(
            "replay_islands: each replica of an island draws separate random numbers, which one "
            "device cannot repeat: with rng= it replays only islands of one replica; got "
            f"island={optimizer.island!r}."
        )
    islands_in_turn = _in_turn(
        "replay_islands", loss_fn, optimizer, params, batches, model_state, rng, has_aux, options
    )
    replay(islands_in_turn, read_log(log))
    return _result(islands_in_turn, params)


def _in_turn(
    call: str,
    loss_fn: Callable[..., Any],
    optimizer: LocalSteps,
    params: PyTree,
    batches: Sequence[Iterable[Any]],
    model_state: PyTree,
    rng: PyTree,
    has_aux: bool,
    options: OptionArguments,
) -> InTurn:
    """Makes the islands before their first step."""
    check_callable(call, "loss_fn", loss_fn)
    if not isinstance(optimizer, AsyncSteps):
        raise ValueError(
            f"{call}: optimizer must be one of fddp.local_steps with a quorum, got {optimizer!r}."
        )
    if optimizer.island == "node":
        raise ValueError(
            f"{call}: one device has no nodes: give local_steps the number of replicas, island=k."
        )
    if optimizer.start:
        raise ValueError(
            f"{call}: the first {optimizer.start} steps run on all islands together, and do not "
            "depend on an order: give the parameters after these steps, and start=0."
        )
    optimizer.among(len(batches))
    group = mesh_group(replica_mesh(jax.local_devices()[:1]))
    objective = make_objective(loss_fn, has_aux=has_aux)
    base = read_options(call, options)
    # The replicas of an island are computed one after the other, like micro-batches.
    settings = replace(base, accumulation_steps=base.accumulation_steps * optimizer.island)
    replica = Replica(
        objective, group, settings, islands(optimizer, WHOLE, None), loss=name_of(loss_fn)
    )

    def step(island: int) -> TrainStep:
        # Each island draws the random numbers of its rank.
        comm = replace(group.communicator, replica_index=lambda: jnp.int32(island))
        island_replica = replace(replica, group=replace(group, communicator=comm))
        return TrainStep(island_replica, optimizer, partial(updated, optimizer.inner))

    if rng is None:
        steps = [step(0)] * len(batches)
    else:
        steps = [step(island) for island in range(len(batches))]
    states = [step.init(params, model_state=model_state, rng=rng) for step in steps]
    rows = [iter(batches_of_island) for batches_of_island in batches]
    numbered = [Island(replica, number, (0,), group) for number in range(len(rows))]
    trained = replica.trained(params)
    merging = on_this_host(merging_of(optimizer.outer, optimizer.quorum.discount, trained))
    return InTurn(
        optimizer, numbered, steps, merging, first_shared(optimizer.outer, trained), states, rows
    )


def _result(islands_in_turn: InTurn, params: PyTree) -> Islands:
    """Collects the result; leaves that are not trained are those of `params`."""
    tree = jax.tree.structure(islands_in_turn.islands[0].replica.trained(params))
    shared = with_trained(params, tree.unflatten(islands_in_turn.shared.params))
    return Islands(shared, tuple(islands_in_turn.states), tuple(islands_in_turn.log))
