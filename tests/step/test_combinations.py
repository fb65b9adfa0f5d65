"""One table refuses combinations of options, and the docs show it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp import hooks
from fddp.step.combinations import (
    AXES,
    COLLECTIVES,
    LOCAL,
    MEMORY,
    MULTI_STEPS,
    PAIRS,
    SCALE_INSIDE,
    WHOLE_LEAVES,
    as_markdown,
)
from models.tensor_parallel import two_axes

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
W = np.ones(4, np.float32)
X = np.ones((4, 4), np.float32)


def loss_fn(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w) ** 2)


def centred(w: Any, x: Any) -> Any:
    return jnp.mean((x @ w - jax.lax.pmean(jnp.mean(x @ w), "replica")) ** 2)


# The arguments for each feature of the table.
OPTIONS: dict[str, dict[str, Any]] = {
    "shard": {"shard": "state"},
    "shard='optimizer'": {"shard": "optimizer"},
    "virtual_replicas": {"virtual_replicas": 4},
    "hook": {"hook": hooks.bf16()},
    MEMORY: {"hook": hooks.quantize()},
    WHOLE_LEAVES: {"hook": hooks.quantize(error_feedback=False)},
    "broadcast_buffers=False": {"broadcast_buffers": False},
    "donate": {"donate": True},
    "check_replicas_every": {"check_replicas_every": 2},
    "skip_nonfinite": {"skip_nonfinite": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    **{f"schedule={name!r}": {"schedule": name} for name in ("overlap", "after", "eager")},
}


def ask(group: Callable[[int], fddp.Group], features: tuple[str, str]) -> None:
    """Makes the calls of a user of these two features."""
    options: dict[str, Any] = {}
    for feature in features:
        options |= OPTIONS.get(feature, {})
    replicas = fddp.mesh_group(two_axes(2, 2)) if AXES in features else group(2)
    loss = centred if COLLECTIVES in features else loss_fn
    if "fddp.value_and_grad" in features:
        fddp.value_and_grad(loss, group=replicas, **options)(W, X)
        return
    inner = optax.adam(0.1)
    optimizer = fddp.local_steps(inner, every=2) if LOCAL in features else inner
    optimizer = (
        optax.MultiSteps(inner, 2).gradient_transformation()
        if MULTI_STEPS in features
        else optimizer
    )
    scaled = optax.MultiSteps(fddp.dynamic_scale(inner), 2).gradient_transformation()
    optimizer = scaled if SCALE_INSIDE in features else optimizer
    step = fddp.train_step(loss, optimizer, group=replicas, **options)
    state = step.init(W)
    batch: Any = next(iter(fddp.join([X], replicas))) if "fddp.join" in features else X
    (step.no_sync if "no_sync" in features else step)(state, batch)


TABLE = [(one, other, *texts) for one, others in PAIRS.items() for other, texts in others.items()]


@pytest.mark.parametrize(
    ("one", "other", "why", "instead"),
    TABLE,
    ids=[f"{one} and {other}" for one, other, *_ in TABLE],
)
def test_a_pair_of_the_table_is_refused_in_its_words(
    group: Callable[[int], fddp.Group], one: str, other: str, why: str, instead: str
):
    with pytest.raises(ValueError) as error:
        ask(group, (one, other))
    assert why in str(error.value) and instead[1:] in str(error.value), error.value


def test_no_pair_stands_twice():
    pairs = [frozenset((one, other)) for one, other, *_ in TABLE]
    assert len(set(pairs)) == len(pairs)


def test_the_page_shows_the_table():
    assert as_markdown() in PAGE.read_text()
