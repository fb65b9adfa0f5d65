"""The options of a step as type checkers know them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import fddp
from fddp.step.options import OptionArguments

CALLS = Path(__file__).with_name("typed_calls.py")
LET_PASS = re.compile(r"  # pyright: ignore\[.*\]$")


def test_the_keyword_arguments_are_the_options_by_name_and_type():
    assert get_type_hints(OptionArguments) == get_type_hints(fddp.Options)
    assert OptionArguments.__required_keys__ == frozenset()


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
