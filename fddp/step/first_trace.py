"""The trace of the first micro-batch, which the step's program evaluates again."""

from typing import Any, NamedTuple

import jax

from fddp.jax_internals import ClosedJaxpr, jaxpr_as_fun, trace_settings, without_jit
from fddp.losses import Pending


class FirstTrace(NamedTuple):
    """The contribution of the first micro-batch, traced."""

    program: ClosedJaxpr
    arguments: Any
    """The tree of (state, micro-batch)."""
    results: Any
    """The tree of a `Pending`."""
    settings: tuple[Any, ...]
    """JAX's settings meanwhile."""

    def again(self, *arguments: Any) -> Pending | None:
        """Evaluates the program; None for arguments of other forms and under other settings."""
        leaves, tree = jax.tree.flatten(arguments)
        form = lambda x: (x.shape, x.dtype, x.weak_type)  # noqa: E731
        same = list(map(form, map(jax.typeof, leaves))) == list(map(form, self.program.in_avals))
        changed = tree != self.arguments or trace_settings() != self.settings
        if without_jit() or changed or not same:
            return None
        return self.results.unflatten(jaxpr_as_fun(self.program)(*leaves))
