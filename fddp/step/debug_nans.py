"""`jax_debug_nans` and `jax_debug_infs` with one behaviour under all schedules.

A step raises after it has ended, and its arguments stay usable. JAX itself checks each program's
outputs and runs a failing program again. In a step of several programs a NaN between them may be no
mistake, and a rank that stops in the middle of a step leaves the other ranks waiting.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fddp.jax_internals import parts_here
from fddp.wording import leaf_name


def with_finite_results(call: Callable[..., Any], together: bool) -> Callable[..., Any]:
    """Makes `call(settled, state, args)` check its results if one of JAX's two flags is set.

    All ranks raise if `together` is True, else this rank by itself: a call without collectives may
    occur more often on one rank than on another.
    """

    @wraps(call)
    def checked(settled: Any, state: Any, args: Any) -> Any:
        flags = (("NaN", jax.debug_nans.value, np.isnan), ("inf", jax.debug_infs.value, np.isinf))
        tests = [(word, test) for word, is_set, test in flags if is_set]
        if not tests:
            return call(settled, state, args)
        with jax.debug_nans(False), jax.debug_infs(False):
            # Copies, because programs reuse the memory of their arguments.
            result = call(settled, state, jax.tree.map(_copied, args))
            failures = [
                f"{word} in {name}"
                for name, x in _floats(result)
                for word, test in tests
                if _holds(test, x)
            ]
            failed = np.int32(len(failures))
            if together:
                failed = settled.replica.group.all_reduce(failed, op="max")
            if failed:
                where = ", ".join(failures[:8]) or "a value of another rank"
                raise FloatingPointError(
                    f"{where} after this step (jax_debug_nans, jax_debug_infs). The input state "
                    "of the step is unchanged. Without these flags skip_nonfinite=True skips "
                    "such steps."
                )
        return result

    return checked


def _copied(x: Any) -> Any:
    return jnp.copy(x) if isinstance(x, jax.Array) else x


def _floats(result: Any) -> list[tuple[str, jax.Array]]:
    """Lists the float arrays of a step's result, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(result)
    arrays = (
        (leaf_name(path[1:]) or ("the loss" if path[0].idx == 0 else "the gradient"), x)
        for path, x in leaves
        if isinstance(x, jax.Array)
    )
    return [(name, x) for name, x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]


def _holds(test: np.ufunc, x: jax.Array) -> bool:
    """Returns True if a test holds anywhere in this process's parts of an array."""
    return any(
        np.any(test(np.asarray(part, np.promote_types(part.dtype, np.float32))))
        for part in parts_here(x)
    )
