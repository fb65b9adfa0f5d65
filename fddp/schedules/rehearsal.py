"""Traces a step ahead of its turn, so that a step that cannot be taken fails early."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from fddp.comm import Group, trace
from fddp.hooks import Memory, Reduction, summed
from fddp.schedules.lists import ARGUMENTS
from fddp.schedules.pieces import Pieces
from fddp.schedules.tasks import SHARDS


def rehearse(group: Group, pieces: Pieces, memory: Memory, *arguments: Any) -> None:
    """Traces a step and the reductions of its messages; nothing is compiled, sent or run.

    `memory` and `arguments` (state, pending, shards, rows) are shapes of one replica. Raises the
    exception that the step itself would raise.
    """
    by_word: dict[str, Any] = dict(zip(ARGUMENTS, arguments))
    received: tuple[Any, Any] = (None, None)
    for piece in pieces.rounds:
        inputs = [by_word[word] for word in piece.reads]
        _, (messages, saved) = trace(group.placement, piece.run, *inputs, *received)
        sums = _sums(group, piece.reductions, memory, messages.arrays)
        received = replace(messages, arrays=sums), saved
    nbytes = jax.ShapeDtypeStruct((len(pieces.reductions),), np.uint32)
    inputs = by_word["state"], by_word[SHARDS]
    trace(group.placement, pieces.finish, *inputs, *received, nbytes)


def _sums(
    group: Group, reductions: Sequence[Reduction], memory: Memory, messages: Sequence[Any]
) -> tuple[Any, ...]:
    """The shapes of the sums of messages."""
    sums = list[Any]()
    for reduction, message in zip(reductions, messages):
        flags = None if reduction.asks is None else sums[reduction.asks.message]
        index = reduction.memory
        hook_memory = memory[index] if memory and index is not None else ()
        reduce = partial(summed, group.communicator, reduction)
        _, (total, _, _) = trace(group.placement, reduce, flags, message, hook_memory)
        sums.append(total)
    return tuple(sums)
