"""Periods of a state's parts: the steps after which islands average the parameters, and each field of their optimizer.

Moments change more slowly than parameters, the second one more slowly than the first, so they may be averaged more
rarely. Between the islands of one node parameters may be averaged more often than between all.

Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers" (arXiv 2505.22549), algorithm 1;
`HierarchicalModelAverager` in PyTorch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fddp.optim.layout import map_state
from fddp.wording import check_whole

PARAMS = "params"
NODE = "node"


class Periods(NamedTuple):
    """The steps between two means of each part."""

    every: int | Callable[[int], int]
    """The period of the parameters, over all islands."""
    others: tuple[tuple[str, int], ...] = ()
    """The periods of further means: `NODE`, of the parameters over a node's islands; or a field of the optimizer's
    state."""


def read_periods(every: Any, delay: int) -> Periods:
    """Reads what `local_steps(every=)` was given.

    Args:
      every: one period, or a mapping from the name of a part to its period.
      delay: steps that a mean is under way.

    Returns:
      The periods.

    Raises:
      ValueError: a period is none, the parameters have none, or a mean would come after the next one has left.
      TypeError: the name of a part is no text.

    Example:
      >>> read_periods({"params": 32, "mu": 96}, 0)
      Periods(every=32, others=(('mu', 96),))
    """
    given = every if isinstance(every, Mapping) else {PARAMS: every}
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"every: the name of a part must be a text, got {name!r}.")
    if PARAMS not in given:
        raise ValueError(f"every must have the period of the parameters, {PARAMS!r}, got {dict(given)}.")
    for name, period in given.items():
        shown = f"every[{name!r}]" if isinstance(every, Mapping) else "every"
        if name == PARAMS and callable(period):
            continue
        check_whole(shown, period, 1)
        if period <= delay:
            raise ValueError(
                f"delay={delay} needs more than one step between two synchronizations, got {shown}={period}."
            )
    return Periods(given[PARAMS], tuple((name, period) for name, period in given.items() if name != PARAMS))


def fields_of(opt_state: Any, params: Any) -> dict[str, tuple[int, ...]]:
    """Finds the arrays of each field of an optimizer's state, wherever in it the field stands.

    Args:
      opt_state: the state of any optax transformation, or its forms.
      params: the parameters that it trains.

    Returns:
      For the name of each field that holds floats the places of these among the state's leaves. Fields of the
      parameters themselves are none of the state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> w = jnp.zeros(3)
      >>> fields_of(optax.chain(optax.clip(1.0), optax.adam(0.1)).init(w), w)
      {'mu': (1,), 'nu': (2,)}
    """
    # A part that is like the parameters becomes one leaf, so that paths end where the parameters begin.
    parts = map_state(_Part, _Part, params, opt_state)
    found: dict[str, tuple[int, ...]] = {}
    at = 0
    for path, part in jax.tree_util.tree_leaves_with_path(parts):
        leaves = jax.tree.leaves(part.tree)
        floats = tuple(at + k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact))
        for name in {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}:
            found[name] = found.get(name, ()) + floats
        at += len(leaves)
    return {name: places for name, places in found.items() if places}


def check_fields(others: tuple[tuple[str, int], ...], opt_state: Any, params: Any) -> None:
    """Refuses the period of a field that an optimizer's state does not have.

    Args:
      others: the periods of further means.
      opt_state: the state, or its forms.
      params: the parameters.

    Raises:
      ValueError: there is no such field, or it holds no floats.
    """
    known = fields_of(opt_state, params)
    for name, _ in others:
        if name != NODE and name not in known:
            fields = ", ".join(map(repr, sorted(known))) or "none"
            raise ValueError(
                f"local_steps: every has a period of {name!r}, and no state of the optimizer has a field of this name "
                f"that holds floats; give {PARAMS!r}, {NODE!r}, or a field of the state: {fields}."
            )


@dataclass(frozen=True)
class _Part:
    """A part of a state, as one leaf."""

    tree: Any
