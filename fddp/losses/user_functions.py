"""Checks of the functions that a user passes."""

import inspect
from collections.abc import Callable, Mapping
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


def check_takes(
    loss_fn: Callable[..., Any], params: Any, batch: Any, extra: Mapping[str, Any]
) -> None:
    """Raises TypeError if a loss does not take the arguments of a step."""
    try:
        inspect.signature(loss_fn, follow_wrapped=False).bind(params, batch, **extra)
    except ValueError:  # a function in C
        return
    except TypeError as error:
        form = ", ".join(["params, batch", *(f"{name}=…" for name in extra)])
        raise TypeError(
            f"the loss must take ({form}): {error}. It gets model_state= and rng= exactly if "
            "step.init has them."
        ) from None
