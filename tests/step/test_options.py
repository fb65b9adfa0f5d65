"""The options of a step as type checkers know them; how a step and its state show themselves."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
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
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(CALLS), str(bare)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = re.findall(r"/(\w+)\.py:(\d+):\d+ - error", done.stdout)
    assert found == [("bare", str(number)) for number in wrong], done.stdout + done.stderr


### Options that change later


def test_a_misspelt_option_of_with_options_is_answered(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(1))
    says = r"fddp.TrainStep.with_options has no option .*did you mean schedule\?$"
    with pytest.raises(TypeError, match=says):
        step.with_options(shedule="staged")  # pyright: ignore[reportCallIssue]


### What shows


def test_a_step_shows_its_loss_its_replicas_its_schedule_and_its_buckets(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(2))
    assert repr(step) == "TrainStep(square, size=2, backend='local', to be settled by the first batch)"
    step(step.init(jnp.zeros(())), jnp.ones(4))
    plan = "1 of 1 leaves in 1 bucket, 0.000 MiB"
    assert repr(step) == f"TrainStep(square, size=2, backend='local', schedule='fused', {plan})"


@pytest.mark.steps
@pytest.mark.parametrize("options", [{}, {"schedule": "eager"}, {"shard": "state", "schedule": "staged"}], ids=str)
def test_a_used_up_state_says_so_in_one_line(group, options):
    step = fddp.train_step(square, optax.adam(0.1), group=group(2), **options)
    first = step.init(jnp.zeros(3))
    second, _ = step(first, jnp.ones((4, 3)))
    assert repr(first) == "TrainState(used up: a step has written the next state where this one lay)"
    assert repr(second).startswith("TrainState(step=")


def test_a_state_shows_itself_where_it_is_traced(group):
    step = fddp.train_step(square, optax.sgd(0.1), group=group(1))
    shown = list[str]()
    jax.make_jaxpr(lambda state: shown.append(repr(state)) or state.step)(step.init(jnp.zeros(3)))
    assert "params=" in shown[0] and "float32[3]" in shown[0]
