"""Checks of the functions that a user passes."""

from collections.abc import Callable
from typing import Any


def check_callable(call: str, name: str, value: Any) -> Callable[..., Any]:
    """Returns a function unchanged; raises TypeError for other values, and for Flax modules.

    Modules are callable, and PyTorch's DDP takes them.
    """
    kind = value
    if not isinstance(kind, type):
        kind = type(value)
    modules = [f"{parent.__module__}.{parent.__name__}" for parent in kind.__mro__]
    for module, adapter in (
        ("flax.linen.module.Module", "from_linen"),
        ("flax.nnx.module.Module", "from_nnx"),
    ):
        if module in modules:
            raise TypeError(
                f"fddp.{call}: {name} must be a loss, a function of parameters and batch, "
                f"got the module {kind.__name__}; fddp.{adapter}(module, loss) builds a loss from "
                "it."
            )
    if not callable(value):
        raise TypeError(f"fddp.{call}: {name} must be a function, got {type(value).__name__}.")
    return value
