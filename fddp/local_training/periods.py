"""Averaging periods of the parameters, and of the fields of an optimizer's state.

Moments change more slowly than parameters, second moments more slowly than first ones, so they can
be averaged less often. The islands of one node can average parameters more often than all islands.

Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers" (arXiv 2505.22549),
algorithm 1; `HierarchicalModelAverager` in PyTorch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from fddp.optim import map_state
from fddp.wording import check_whole

PARAMS = "params"
NODE = "node"


class Periods(NamedTuple):
    """Averaging periods, in steps."""

    every: int | Callable[[int], int]
    """Period of the parameters, over all islands."""
    others: tuple[tuple[str, int], ...] = ()
    """Periods of further means: `NODE` for the parameters over a node's islands, or the name of a
    field of the optimizer's state."""


def read_periods(every: Any, delay: int) -> Periods:
    """Checks and normalizes `local_steps(every=)`; each period must exceed the delay.

    >>> read_periods({"params": 32, "mu": 96}, 0)
    Periods(every=32, others=(('mu', 96),))
    """
    periods = every if isinstance(every, Mapping) else {PARAMS: every}
    for name in periods:
        if not isinstance(name, str):
            raise TypeError(f"every: the name of a part must be a str, got {name!r}.")
    if PARAMS not in periods:
        raise ValueError(
            f"every must have the period of the parameters, {PARAMS!r}, got {dict(periods)}."
        )
    for name, period in periods.items():
        shown = f"every[{name!r}]" if isinstance(every, Mapping) else "every"
        if name == PARAMS and callable(period):
            continue
        check_whole(shown, period, 1)
        if period <= delay:
            raise ValueError(
                f"delay={delay} needs more than one step between two synchronizations, got "
                f"{shown}={period}."
            )
    return Periods(
        periods[PARAMS],
        tuple((name, period) for name, period in periods.items() if name != PARAMS),
    )


def fields_of(opt_state: PyTree, params: PyTree) -> dict[str, tuple[int, ...]]:
    """Maps the name of each field of an optimizer's state to the positions of its float leaves.

    Fields inside the parameters do not count.

    >>> import jax.numpy as jnp, optax
    >>> w = jnp.zeros(3)
    >>> fields_of(optax.chain(optax.clip(1.0), optax.adam(0.1)).init(w), w)
    {'mu': (1,), 'nu': (2,)}
    """
    # A subtree like the parameters becomes one leaf, so that paths end where the parameters begin.
    subtrees = map_state(_Part, _Part, params, opt_state)
    positions: dict[str, tuple[int, ...]] = {}
    offset = 0
    for path, subtree in jax.tree_util.tree_leaves_with_path(subtrees):
        leaves = jax.tree.leaves(subtree.tree)
        floats = tuple(
            offset + k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)
        )
        for name in {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}:
            positions[name] = positions.get(name, ()) + floats
        offset += len(leaves)
    return {name: numbers for name, numbers in positions.items() if numbers}


def check_fields(periods: tuple[tuple[str, int], ...], opt_state: PyTree, params: PyTree) -> None:
    """Raises ValueError if a period names a field that the optimizer's state lacks."""
    positions = fields_of(opt_state, params)
    for name, _ in periods:
        if name != NODE and name not in positions:
            fields = ", ".join(map(repr, sorted(positions))) or "none"
            raise ValueError(
                f"local_steps: every has a period of {name!r}, and no state of the optimizer has a "
                f"field of this name that holds floats; give {PARAMS!r}, {NODE!r}, or a field of "
                f"the state: {fields}."
            )


@dataclass(frozen=True)
class _Part:
    """A subtree of a state, as one leaf."""

    tree: Any
