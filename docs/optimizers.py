"""Writes docs/optimizers.md: which optimizers of the installed optax fddp divides among replicas.

    uv run python docs/optimizers.py

Each answer is read from the program of the optimizer's update, as `shard=` reads it.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fddp.optim import check_needs
from fddp.optim.parts import divided

PAGE = Path(__file__).parent / "optimizers.md"
FORMS = {
    "b": jax.ShapeDtypeStruct((3,), "float32"),
    "w": jax.ShapeDtypeStruct((128, 130), "float32"),
}
NEEDED = {"learning_rate": 0.1, "key": 0}


INTRODUCTION = (
    "An appendix of [sharding the state](sharding.md): the optimizers of optax "
    f"{optax.__version__}, for parameters `b` of 3 and `w` of 128 × 130 elements. "
    "`docs/optimizers.py` reads the answers from the programs of their updates, as fddp does for "
    "your optimizer: optimizers that are not in the table may work too."
)
COMPLEX = (
    "Give complex leaves to `optax.adam` and the like as they are: with `shard=` `step.init` "
    "refuses `optax.contrib.split_real_and_imaginary`, whose state has two arrays for each leaf."
)
ANSWERS = {
    "yes": "Each replica updates its part of each leaf:",
    "owner": "One replica updates the named leaf, for the operation in parentheses:",
    "no": "`step.init` refuses `shard=`, for the leaves in parentheses:",
    "none": "No step takes it, with or without `shard=`: its update needs a function of the loss:",
}


def main() -> None:
    PAGE.write_text(page())
    print(PAGE)


def page() -> str:
    """The page, in Markdown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deprecated", DeprecationWarning)
        found = [(f"`optax.{name}`", *answer(make)) for name, make in aliases().items()]
    sections = [
        "\n\n".join(
            [
                f"**{text}**",
                fill(", ".join(name + why for name, key, why in found if key == kind), 120),
            ]
        )
        for kind, text in ANSWERS.items()
    ]
    title, end = "# Optimizers in shards", fill(COMPLEX, 120)
    return "\n\n".join([title, fill(INTRODUCTION, 120), *sections, end]) + "\n"


def aliases() -> dict[str, Callable[..., Any]]:
    """All of optax's aliases, and the optimizers of its contrib that need only a learning rate."""
    functions = {
        name: f
        for name, f in vars(optax).items()
        if getattr(f, "__module__", "") == "optax._src.alias"
    }
    contrib = {
        f"contrib.{name}": f for name, f in vars(optax.contrib).items() if inspect.isfunction(f)
    }
    named = {name: inspect.signature(f).parameters for name, f in contrib.items()}
    rates = {
        name: contrib[name]
        for name, parameters in named.items()
        if "learning_rate" in parameters and required(parameters) <= set(NEEDED)
    }
    return {name: f for name, f in sorted((functions | rates).items()) if inspect.isfunction(f)}


def required(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """The parameters without a default; a key has one that warns."""
    return {
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty or name == "key"
    }


def answer(make: Callable[..., Any]) -> tuple[str, str]:
    """The key of an answer, and the leaves that it concerns."""
    parameters = inspect.signature(make).parameters
    optimizer = make(**{name: NEEDED[name] for name in required(parameters)})
    try:
        check_needs(optimizer, jax.tree.map(lambda x: jnp.zeros(x.shape), FORMS))
    except TypeError:
        return "none", ""
    division = divided(optimizer, FORMS)
    leaves = ", ".join(
        f"{sorted(FORMS)[leaf]}: {reason}"
        for leaf, reason in (division.refused or division.owned).items()
    )
    kind = "no" if division.refused else "owner" if leaves else "yes"
    return kind, f" ({leaves})" if leaves else ""


if __name__ == "__main__":
    main()
