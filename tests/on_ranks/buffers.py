"""Buffers and random keys of several ranks."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim
from problems import RATE, rows, square

import fddp


def keep_mean(w: Any, x: Any, *, model_state: Any) -> Any:
    return square(w, x) + 0 * model_state["seen"], (
        {"calls": model_state["calls"] + 1, "seen": jnp.mean(x)},
        None,
    )


@claim()
def rank_0s_buffers_are_everybodys(group: fddp.Group):
    step = fddp.train_step(keep_mean, optax.sgd(RATE), group=group)
    state = step.init(
        jnp.zeros(()),
        model_state={"calls": jnp.int32(2**30), "seen": jnp.float32(group.rank + 5)},
    )
    assert float(state.model_state["seen"]) == 5
    state, _ = step(state, rows(group.rank + 3))
    assert float(state.model_state["seen"]) == 3, "what rank 0 saw"
    assert int(state.model_state["calls"]) == 2**30 + 1, "exact, though it travels among floats"


@claim()
def all_ranks_have_one_program_though_rank_0_alone_sends_its_buffers(group: fddp.Group):
    """Another program would round an equal update differently."""
    step = fddp.train_step(keep_mean, optax.sgd(RATE, momentum=0.9), group=group)
    state = step.init(jnp.zeros(()), model_state={"calls": jnp.int32(0), "seen": jnp.float32(0)})
    text = step.lower(state, rows(group.rank)).compile().as_text() or ""
    operations = [
        x for x in re.findall(r" = (.*?)(?:, metadata=.*)?\n", text) if "constant(" not in x
    ]
    assert len(set(group.all_gather_object(re.sub(r"[\d.]+", "", "".join(operations))))) == 1


@claim()
def without_broadcast_every_rank_keeps_its_buffers(group: fddp.Group):
    step = fddp.train_step(keep_mean, optax.sgd(RATE), group=group, broadcast_buffers=False)
    state = step.init(jnp.zeros(()), model_state={"calls": jnp.int32(0), "seen": jnp.float32(0)})
    for number in range(2):
        state, _ = step(state, rows(group.rank + number))
    local = state.model_state["seen"].addressable_shards[0].data
    assert float(local) == group.rank + 1


@claim()
def random_keys_differ_between_ranks_and_steps(group: fddp.Group):
    def draw(w: Any, x: Any, *, rng: Any) -> Any:
        number = jax.random.uniform(rng)
        return square(w, x), {"number": number}

    step = fddp.train_step(draw, optax.sgd(RATE), group=group, has_aux=True)
    state = step.init(jnp.zeros(()), rng=jax.random.key(1))
    drawn = []
    for _ in range(2):
        _, rank_info = step.no_sync(jax.tree.map(jnp.copy, state), rows(1.0))
        drawn.extend(group.all_gather(np.asarray(rank_info.aux["number"])).tolist())
        state, info = step(state, rows(1.0))
        assert np.isclose(float(info.aux["number"]), np.mean(drawn[-group.size :])), (
            "the step draws the same"
        )
    assert len(set(drawn)) == 2 * group.size
