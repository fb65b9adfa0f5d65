"""The residual of a pseudo-gradient is added when its fragment is sent again: against loops in
NumPy."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from problems import layer
from trees import close

import fddp

pytestmark = pytest.mark.steps

Groups = Callable[[int], fddp.Group]
DRAW = np.random.default_rng(12)
PARAMS = {"b": DRAW.normal(size=5), "w": DRAW.normal(size=(3, 5))}
ROWS = DRAW.normal(size=(9, 12, 3))  # a batch for each step
RATE = 0.1
SHARE = 0.4


class Sparse:
    """Sends a replica's largest numbers, and remembers the others."""

    def __init__(self) -> None:
        self.residual: Any = 0.0

    def compress(self, x: np.ndarray) -> np.ndarray:
        x = x + self.residual
        chosen = np.argsort(-np.abs(x))[: math.ceil(SHARE * x.size)]
        message = np.zeros_like(x)
        message[chosen] = x[chosen]
        self.residual = x - message
        return message


def oracle(
    islands: int, each: int, start: int
) -> tuple[Any, dict[str, list[Sparse]], dict[str, list[Sparse]]]:
    """Trains islands of so many replicas, w synchronized after each odd step, b after each even
    one."""
    n = islands * each
    of_gradients, of_changes = (
        {name: [Sparse() for _ in range(n)] for name in PARAMS} for _ in range(2)
    )
    shared = {name: x.copy() for name, x in PARAMS.items()}
    local = [{name: x.copy() for name, x in PARAMS.items()} for _ in range(islands)]
    weights = dict.fromkeys(PARAMS, 0.0)
    for number, batch in enumerate(ROWS, 1):
        grads = [
            jax.grad(layer)(local[r // each], rows) for r, rows in enumerate(np.split(batch, n))
        ]
        together = number <= start
        for name, x in PARAMS.items():
            # One replica alone sends no gradient.
            sends = together or each > 1
            messages = [np.ravel(g[name]) for g in grads]
            messages = (
                [hook.compress(g) for hook, g in zip(of_gradients[name], messages)]
                if sends
                else messages
            )
            for k in range(islands):
                group_messages = messages if together else messages[k * each : (k + 1) * each]
                local[k][name] = local[k][name] - RATE * np.mean(group_messages, axis=0).reshape(
                    x.shape
                )
            if together:
                shared[name] = local[0][name].copy()
                continue
            weights[name] += each
            if (number - start) % 2 == (name == "w"):
                received = np.zeros((each, -(-x.size // each)))
                for r in range(n):
                    change = np.ravel(shared[name] - local[r // each][name])
                    pieces = np.pad(weights[name] * change, (0, -x.size % each)).reshape(each, -1)
                    received[r % each] += of_changes[name][r].compress(pieces[r % each]) / (
                        islands * weights[name]
                    )
                shared[name] = shared[name] - received.reshape(-1)[: x.size].reshape(x.shape)
                weights[name] = 0.0
                for k in range(islands):
                    local[k][name] = shared[name].copy()
    return local, of_gradients, of_changes


@pytest.mark.quick("fused-replicas-3", "fused-islands of two-3", "staged-replicas-0")
@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("islands, each", [(2, 1), (2, 2)], ids=["replicas", "islands of two"])
@pytest.mark.parametrize("schedule", ["fused", "staged"])
def test_what_is_lost_of_a_fragment_comes_when_it_is_sent_again(
    group: Groups, x64: None, schedule: Any, islands: int, each: int, start: int
):
    optimizer = fddp.local_steps(optax.sgd(RATE), every=2, fragments=2, island=each, start=start)
    options = {"group": group(islands * each), "hook": fddp.hooks.topk(SHARE), "schedule": schedule}
    step = fddp.train_step(layer, optimizer, bucket_cap_mb=0, **options)
    state = step.init(PARAMS)
    for rows in ROWS:
        state, _ = step(state, rows)
    local, of_gradients, of_changes = oracle(islands, each, start)
    for name in PARAMS:
        params = np.asarray(state.params[name].parts).reshape(islands * each, -1)
        close(
            params,
            np.stack([local[r // each][name].ravel() for r in range(islands * each)]),
            atol=1e-12,
        )
        memory = state.hook_state[name]
        close(
            np.asarray(memory["pseudo-gradient"]),
            np.stack([x.residual for x in of_changes[name]]),
            atol=1e-12,
        )
        if start or each > 1:
            residual = np.asarray(memory["gradient"]).reshape(islands * each, -1)
            close(residual, np.stack([x.residual for x in of_gradients[name]]), atol=1e-12)
        else:
            assert memory["gradient"] == ()


def test_what_is_lost_of_numbers_of_16_bits_is_remembered_in_32(group: Groups):
    params = jax.tree.map(np.float16, PARAMS)
    hook = fddp.hooks.quantize(block=8)
    step = fddp.train_step(
        layer, fddp.local_steps(optax.sgd(RATE), every=2), group=group(2), hook=hook
    )
    state = step.init(params)
    for rows in ROWS[:4]:
        state, _ = step(state, np.float16(rows))
    assert {x.dtype.name for x in jax.tree.leaves(state.hook_state)} == {"float32"}
    assert any(np.any(x) for x in jax.tree.leaves(state.hook_state))
    assert {x.dtype.name for x in jax.tree.leaves(fddp.whole(state.params))} == {"float16"}
