"""Every script of bench/ runs, with --quick too."""

import importlib
import math
import re
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from bench import hosts
from bench.all import questions
from bench.jobs import start
from bench.mutants import KINDS, NEAREST, ROOT, Mutant, applies, read_mutants
from bench.problems import BACKWARD_S, ELEMENTS, FORWARD_S, LAYERS, waiting
from bench.record import saved, with_table

BENCH = Path(__file__).parents[1] / "bench"
QUESTIONS = [*questions(), "all"]


@pytest.mark.steps
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_says_what_it_asks_and_has_a_quick_answer(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"bench.{name}").main()
    shown = capsys.readouterr().out
    assert "--quick" in shown and "?" in shown


def test_the_table_of_2_to_16_hosts_is_what_was_saved():
    page = hosts.PAGE.read_text()
    assert with_table(page, hosts.as_markdown(saved("hosts")), "bench/hosts.py") == page


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("MLP, 32 MiB of gradients, 1,024 rows", "mlp"),
        ("the same, 640 rows", "mlp640"),
        ("ResNet-18, 45 MiB", "resnet18"),
        ("GPT, 36 MiB", "gpt"),
    ],
)
def test_the_table_of_schedules_is_what_was_measured(row, problem):
    section = section_of("Schedules, plain JAX and PyTorch DDP")
    (line,) = re.findall(rf"^\| {row} \|(.*)$", section, re.MULTILINE)
    ms = {way: median for way, (_, median, _) in saved("overlap")[problem]["step_ms"].items()}
    ddp_ms = min(median for way, median in ms.items() if way.startswith("PyTorch DDP"))
    others = (
        "alone (Gloo)",
        "fddp overlap (Gloo)",
        "fddp eager (Gloo)",
        "fddp after (Gloo)",
        "jit, NamedSharding",
        "shard_map, psum per leaf",
    )
    measured = [*(ms[way] for way in others), ddp_ms, ms["PyTorch, alone"]]
    shown = [int(number) for number in re.findall(r"\d+", line)]
    assert shown == [math.floor(x + 0.5) for x in measured]


def section_of(heading: str) -> str:
    """The text of a section of the README."""
    return (BENCH / "README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_the_list_of_questions_is_complete():
    listed = (BENCH / "README.md").read_text()
    assert [name for name in QUESTIONS if f"bench/{name}.py" not in listed] == []


def test_the_list_of_what_needs_emulated_hosts_is_complete():
    (listed,) = re.findall(
        r"\n\n((?:(?!\n\n).)*) What they share:", (BENCH / "README.md").read_text(), re.DOTALL
    )
    uses = re.compile(r"^from bench\.(two_hosts import|turns import .*take_turns)", re.MULTILINE)
    need = {name for name in QUESTIONS if uses.search((BENCH / f"{name}.py").read_text())}
    assert set(re.findall(r"`(\w+)`", listed)) == need


def test_each_mutant_applies_and_changes_one_line_of_its_package():
    mutants = read_mutants()
    wrong = {mutant.name: faults for mutant in mutants if (faults := faults_of(mutant))}
    assert mutants and not wrong


def faults_of(mutant: Mutant) -> list[str]:
    """The faults of a patch in tests/mutants/."""
    text = mutant.patch.read_text()
    files = re.findall(r"^\+\+\+ b/(.*)$", text, re.MULTILINE)
    changes = [re.findall(rf"^\{sign}(?!\{sign}\{sign} )", text, re.MULTILINE) for sign in "-+"]
    right = {
        "it does not apply": applies(mutant.patch, ROOT, check=True),
        "it changes not one line": [len(lines) for lines in changes] == [1, 1],
        "it changes another package": all(x.startswith(f"fddp/{mutant.package}/") for x in files),
        "no tests are near": mutant.package in NEAREST,
        "its kind is none": mutant.kind in KINDS,
        "it says not in a sentence what is wrong": mutant.fault.endswith("."),
    }
    return [words for words, holds in right.items() if not holds]


def test_a_network_that_waits_has_the_gradients_of_the_sum_of_its_layers_means():
    task = waiting(seed=1, forward_s=0.0, backward_s=0.0)
    (loss, _), grads = jax.value_and_grad(task.loss_fn, has_aux=True)(task.params, task.batch)
    off = np.asarray(task.batch, np.float64) - 1.0  # all parameters are zero
    np.testing.assert_allclose(loss, np.mean(off**2), rtol=1e-6)
    by_hand = np.full(ELEMENTS, 2 * np.mean(off) / ELEMENTS)
    for grad in grads.values():
        np.testing.assert_allclose(grad, by_hand, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_no_step_measured_on_loopback_is_shorter_than_its_waits():
    measurement = hosts.measure({"gloo": partial(start, "gloo", 2)}, 2, 100, rounds=1)
    least = 1e3 * LAYERS * (FORWARD_S + BACKWARD_S)
    low = {way: low for way, (low, _, _) in measurement["step_ms"].items()}
    assert {"fddp overlap (Gloo)", "fddp after (Gloo)", "alone (Gloo)"} <= set(low)
    assert min(low.values()) >= least
