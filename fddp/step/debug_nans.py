"""`jax_debug_nans` and `jax_debug_infs`, alike under every schedule: a step raises, and its arguments stay usable.

JAX checks what each program returns, and runs a program again that returns NaN. Of a step in several programs a NaN in
between may be no mistake, and ranks that stop in mid-step leave others waiting.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.jax_internals import parts_here
from fddp.schedules import awaited
from fddp.wording import leaf_name


def with_finite_results(call: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call of a step, `call(settled, state, given)`, check its results if JAX's flags are set."""

    @wraps(call)
    def checked(settled: Any, state: Any, given: Any) -> Any:
        flags = (("NaN", jax.debug_nans.value, np.isnan), ("inf", jax.debug_infs.value, np.isinf))
        wanted = [(word, test) for word, is_set, test in flags if is_set]
        if not wanted:
            return call(settled, state, given)
        with jax.debug_nans(False), jax.debug_infs(False):
            result = call(settled, state, jax.tree.map(_copied, given))  # programs reuse the memory of their arguments
            found = [f"{word} in {name}" for name, x in _floats(result) for word, test in wanted if _holds(test, x)]
            if settled.replica.group.all_reduce(np.int32(len(found)), op="max"):
                where = ", ".join(found[:8]) or "a value of another rank"
                raise FloatingPointError(
                    f"{where} after this step (jax_debug_nans, jax_debug_infs). The state that the step was given is "
                    "unchanged. Without these flags skip_nonfinite=True leaves out such steps."
                )
        return result

    return checked


def _copied(x: Any) -> Any:
    x = awaited(x)
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _floats(result: Any) -> list[tuple[str, jax.Array]]:
    """The arrays of floats in a pair of results, by name."""
    named = jax.tree_util.tree_leaves_with_path(result)
    arrays = ((leaf_name(path[1:]) or "the loss", x) for path, x in named if isinstance(x, jax.Array))
    return [(name, x) for name, x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def _holds(test: Callable[[Any], Any], x: jax.Array) -> bool:
    """Whether a part of an array that this process has passes a test."""
    return any(np.any(test(np.asarray(part, np.promote_types(part.dtype, np.float32)))) for part in parts_here(x))
