"""`models/twin.py`, a step in plain JAX, trains as fddp does, and its page shows its lines."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from trees import close

import fddp
from models import twin

pytestmark = pytest.mark.steps

PAGE = Path(__file__).parents[1] / "docs" / "twin.md"
DRAW = np.random.default_rng(7)
PARAMS = {"hidden": DRAW.normal(size=(4, 8)), "out": DRAW.normal(size=8), "shift": np.zeros(())}
BATCHES = DRAW.normal(size=(5, 16, 4))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05))


def loss_fn(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] + params["shift"] - 1) ** 2)


def replicas(count: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:count]), "replica")


def start() -> twin.State:
    params = jax.tree.map(jnp.asarray, PARAMS)
    return twin.State(params, OPTIMIZER.init(params))


@pytest.mark.parametrize("count", [2, 8])
def test_the_twin_and_fddp_train_to_the_same_state(group, x64, count):
    plain_step = twin.train_step(loss_fn, OPTIMIZER, replicas(count))
    step = fddp.train_step(loss_fn, OPTIMIZER, group=group(count))
    plain = start()
    state = step.init(PARAMS)
    for batch in BATCHES:
        plain, loss = plain_step(plain, batch)
        state, info = step(state, batch)
        np.testing.assert_allclose(info.loss, loss, rtol=1e-12)
    close((state.params, state.opt_state), tuple(plain), rtol=1e-10)


def test_the_twin_sends_one_all_reduce_for_each_leaf_and_one_for_the_loss(x64):
    lowered = jax.jit(twin.train_step(loss_fn, OPTIMIZER, replicas(2))).lower(start(), BATCHES[0])
    assert len(re.findall(r"stablehlo\.all_reduce", lowered.as_text())) == len(PARAMS) + 1


def test_the_page_shows_the_twins_own_lines():
    (shown,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert textwrap.indent(shown, "    ") in inspect.getsource(twin.train_step)


def test_the_twin_has_forty_lines_as_the_page_says():
    lines = inspect.getsource(twin).partition("from collections")[2].splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 40
