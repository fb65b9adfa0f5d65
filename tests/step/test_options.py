"""The options of a step for type checkers; the printed forms of a step and its state."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import square

import fddp
from fddp.step.options import OptionArguments

CALLS = Path(__file__).with_name("typed_calls.py")
LET_PASS = re.compile(r"  # pyright: ignore\[.*\]$")


### Types


def test_the_keyword_arguments_are_the_options_by_name_and_type():
    assert get_type_hints(OptionArguments) == get_type_hints(fddp.Options)
    assert OptionArguments.__required_keys__ == frozenset()


@pytest.mark.steps
def test_pyright_lets_every_right_call_pass_and_no_wrong_one(tmp_path: Path):
    lines = CALLS.read_text().splitlines()
    wrong = [number for number, line in enumerate(lines, 1) if LET_PASS.search(line)]
    assert len(wrong) > 10
    bare = tmp_path / "bare.py"
    bare.write_text("\n".join(LET_PASS.sub("", line) for line in lines))
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        str(CALLS),
        str(bare),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    errors = re.findall(r"/(\w+)\.py:(\d+):\d+ - error", completed.stdout)
    assert errors == [("bare", str(number)) for number in wrong], (
        completed.stdout + completed.stderr
    )


### Options that change later


LAYERS = {"a": np.full((5, 7), 0.1, np.float32), "b": np.full(7, 0.5, np.float32)}
ROWS = np.random.default_rng(0).normal(size=(6, 8, 5)).astype(np.float32)


def two_layers(params: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - 1) ** 2)


def is_a(path: str) -> bool:
    return path == "a"


IGNORED: dict[str, tuple[Any, Any]] = {"frozen": (None, is_a), "unfrozen": (is_a, None)}
OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(0.05),
}


def by_hand(optimizer: Any, ignored: tuple[Any, Any]) -> Any:
    """Trains three steps in each phase in plain JAX, with a new optimizer state for each phase."""
    params: Any = LAYERS
    for ignore, batches in zip(ignored, (ROWS[:3], ROWS[3:])):
        trained = {name: x for name, x in params.items() if ignore is None or not ignore(name)}
        state = optimizer.init(trained)
        for x in batches:
            grads = jax.grad(lambda trainable, frozen, x: two_layers(frozen | trainable, x))(
                trained, params, x
            )
            updates, state = optimizer.update(grads, state, trained)
            trained = optax.apply_updates(trained, updates)
        params = params | trained
    return params


@pytest.mark.quick(
    "frozen-adam-state",
    "unfrozen-adam-None",
    "frozen-momentum-None",
    "unfrozen-momentum-state",
    "unfrozen-sgd-None",
)
@pytest.mark.steps
@pytest.mark.parametrize("shard", [None, "state"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("change", IGNORED)
def test_a_layer_is_frozen_or_unfrozen_by_a_step_of_its_own(group, change, name, shard):
    """`step.init` of the current parameters does it; `with_options` works for an optimizer without
    state."""
    before, after = IGNORED[change]
    optimizer = OPTIMIZERS[name]
    options: Any = {"group": group(4), "shard": shard, "donate": False}
    step = fddp.train_step(two_layers, optimizer, ignore=before, **options)
    state = step.init(LAYERS)
    for x in ROWS[:3]:
        state, _ = step(state, x)
    if shard:
        with pytest.raises(
            ValueError, match=r"change the layout of a state, got ignore: use train_step"
        ):
            step.with_options(ignore=after)
    elif name != "sgd":
        message = (
            r"to other trained parameters \(ignore=\).*step.init\(fddp.whole\(state.params\)\)"
        )
        with pytest.raises(ValueError, match=message):
            step.with_options(ignore=after)(state, ROWS[3])
    later = fddp.train_step(two_layers, optimizer, ignore=after, **options)
    phases = [(later, later.init(fddp.whole(state.params)))]
    if name == "sgd" and not shard:
        phases.append((step.with_options(ignore=after), state))
    expected = by_hand(optimizer, (before, after))
    for second, trained in phases:
        for x in ROWS[3:]:
            trained, _ = second(trained, x)
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, fddp.whole(trained.params), expected)


def test_a_misspelt_option_of_with_options_is_answered(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(1))
    message = r"fddp.TrainStep.with_options has no option .*did you mean schedule\?$"
    with pytest.raises(TypeError, match=message):
        step.with_options(shedule="after")  # pyright: ignore[reportCallIssue]


### Printed options


def test_a_step_shows_its_loss_its_replicas_and_its_buckets(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2))
    assert (
        repr(step) == "TrainStep(square, size=2, backend='local', to be settled by the first batch)"
    )
    step(step.init(jnp.zeros(())), jnp.ones(4))
    plan = "1 of 1 leaves in 1 bucket, 0.000 MiB"
    assert repr(step) == f"TrainStep(square, size=2, backend='local', {plan})"


@pytest.mark.steps
@pytest.mark.parametrize("options", [{}, {"shard": "state"}], ids=str)
def test_a_used_up_state_says_so_in_one_line(group, options):
    step = fddp.train_step(square, optax.adam(0.1), group=group(2), **options)
    first = step.init(jnp.zeros(3))
    second, _ = step(first, jnp.ones((4, 3)))
    assert repr(first) == "TrainState(used up: a step has written the next state into its memory)"
    assert repr(second).startswith("TrainState(step=")


def test_a_state_shows_itself_where_it_is_traced(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(1))
    shown = list[str]()
    jax.make_jaxpr(lambda state: shown.append(repr(state)) or state.step)(step.init(jnp.zeros(3)))
    assert "params=" in shown[0] and "float32[3]" in shown[0]
