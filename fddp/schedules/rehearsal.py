"""Tries a step on the forms of its arguments: a step that cannot be taken fails before it is due."""

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
    """Traces a step that is due later, the sums of its messages too; nothing is compiled, sent or run.

    Args:
      group: the replicas.
      pieces: the step.
      memory: the forms of what one replica's hooks remember.
      *arguments: state, pending, shards and rows: the forms of what one replica has.

    Raises:
      Exception: what the step itself would raise when it is first due.
    """
    given: dict[str, Any] = dict(zip(ARGUMENTS, arguments))
    came: tuple[Any, Any] = (None, None)
    for one in pieces.rounds:
        _, (messages, kept) = trace(group.placement, one.run, *(given[word] for word in one.reads), *came)
        came = replace(messages, arrays=_sums(group, one.reductions, memory, messages.arrays)), kept
    nbytes = jax.ShapeDtypeStruct((len(pieces.reductions),), np.uint32)
    trace(group.placement, pieces.finish, given["state"], given[SHARDS], *came, nbytes)


def _sums(group: Group, reductions: Sequence[Reduction], memory: Memory, messages: Sequence[Any]) -> tuple[Any, ...]:
    """The forms in which messages come back."""
    back = list[Any]()
    for one, message in zip(reductions, messages):
        said = None if one.asks is None else back[one.asks.message]
        mine = memory[one.memory] if memory and one.memory is not None else ()
        _, (total, _, _) = trace(group.placement, partial(summed, group.communicator, one), said, message, mine)
        back.append(total)
    return tuple(back)
