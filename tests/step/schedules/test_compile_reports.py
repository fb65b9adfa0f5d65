"""Rank 0 reports long compilations, with their duration so far; the other ranks report nothing."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp
from fddp.step.schedules import compile_reports, report_compiling, report_first_call

ROWS = np.ones((8, 4), np.float32)
PARAMS = {"first": np.ones((4, 3), np.float32), "second": np.ones(3, np.float32)}
pytestmark = pytest.mark.usefixtures("uncached")


def net(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(batch @ params["first"]) @ params["second"]) ** 2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first report is printed at once."""
    monkeypatch.setattr(compile_reports, "FIRST_WORD_S", 0.0)
    monkeypatch.setattr(compile_reports, "NEXT_WORD_S", 0.001)


@pytest.mark.steps
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"virtual_replicas": 2}, r"and starting .*"),
        ({}, r"and starting the step"),
    ],
    ids=str,
)
def test_a_step_says_what_compiles(group, impatient, capsys, options: dict[str, Any], pattern: str):
    step = fddp.train_step(net, optax.sgd(0.1), group=group(2), bucket_cap_mb=0, **options)
    state, _ = step(step.init(PARAMS), ROWS)
    lines = capsys.readouterr().err.splitlines()
    reports = [
        line for line in lines if re.fullmatch(rf"fddp: compiling {pattern}, \d+ s so far", line)
    ]
    assert reports and lines[-len(reports) :] == reports
    before = lines[: -len(reports)]  # programs are traced before the first one is compiled
    assert all(re.fullmatch(r"fddp: compiling a step, \d+ s so far", line) for line in before)
    state, _ = step(state, ROWS)
    jax.block_until_ready(state)
    assert capsys.readouterr().err == ""


def test_ten_seconds_pass_before_anything_is_said(monkeypatch, group):
    waits = list[tuple[float, float]]()

    @contextmanager
    def noted(state: Any, first_s: float, next_s: float) -> Iterator[None]:
        waits.append((first_s, next_s))
        yield

    monkeypatch.setattr(compile_reports, "reports", noted)
    with report_compiling(group(1), "the step"):
        pass
    assert waits == [(10.0, 30.0)]


def test_rank_0_alone_says_so(group, impatient, capsys):
    with report_compiling(replace(group(1), rank=1), "the step"):
        jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert capsys.readouterr().err == ""


def test_an_error_of_the_compiler_is_the_error_and_the_next_call_compiles_again(
    monkeypatch, group, impatient
):
    calls = list[int]()

    def program(x: int) -> int:
        calls.append(x)
        if len(calls) == 1:
            raise RuntimeError("out of memory while compiling")
        return x

    reports = list[str]()

    def noted(group: fddp.Group, what: str) -> AbstractContextManager[None]:
        reports.append(what)
        return report_compiling(group, what)

    monkeypatch.setattr(compile_reports, "report_compiling", noted)
    run = report_first_call(program, "the step", group(1))
    with pytest.raises(RuntimeError, match="out of memory while compiling"):
        run(1)
    assert [run(2), run(3)] == [2, 3]
    assert reports == ["and starting the step"] * 2
