"""Every question of bench/ can be asked, and in a hurry too."""

import importlib
import sys
from pathlib import Path

import pytest

from bench import beside

BENCH = Path(__file__).parents[1] / "bench"
ASKING = sorted(path.stem for path in BENCH.glob("*.py") if "argparse" in path.read_text())
QUESTIONS = [name for name in ASKING if name != "two_hosts"]  # a tool


@pytest.mark.steps
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_says_what_it_asks_and_has_a_quick_answer(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"bench.{name}").main()
    shown = capsys.readouterr().out
    assert "--quick" in shown and "?" in shown


def test_the_table_of_plain_jax_is_what_was_saved():
    page = beside.PAGE.read_text()
    assert beside.with_table(page, beside.sections(beside.saved())) == page


def test_the_list_of_questions_is_complete():
    listed = (BENCH / "README.md").read_text()
    assert [name for name in QUESTIONS if f"bench/{name}.py" not in listed] == []
