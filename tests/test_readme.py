"""The README's code runs, prints what it says there, and differs from a local script where it says."""

import difflib
import re
import runpy
from pathlib import Path

import pytest
from processes import launch

import fddp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST, ALONE, REPLICAS, *MORE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(PRINTED,) = re.findall(r"```\n(2 replicas.*?)```", README, re.DOTALL)


def run(script: str, size: int, folder: Path) -> list[str]:
    """What each of `size` MPI ranks prints."""
    path = folder / "script.py"
    path.write_text(script)
    outcome = launch("mpi", size, str(path), folder=folder, timeout_s=120)
    assert outcome.succeeded, outcome.outputs
    return [output.strip() for output in outcome.outputs]


def test_the_first_script_prints_what_the_readme_says(tmp_path):
    assert run(FIRST, 2, tmp_path) == [PRINTED.strip(), ""]


def test_the_first_script_has_at_most_twenty_lines():
    assert len([line for line in FIRST.splitlines() if line.strip()]) <= 20


def test_a_local_script_and_its_distributed_form_find_the_same_loss(tmp_path, capsys):
    (tmp_path / "alone.py").write_text(ALONE)
    runpy.run_path(str(tmp_path / "alone.py"))
    alone = capsys.readouterr().out.strip()
    assert run(REPLICAS, 2, tmp_path) == [alone, alone]


def test_the_distributed_script_differs_in_a_few_lines_and_not_in_the_loss():
    local, spread = ([line for line in text.splitlines() if line.strip()] for text in (ALONE, REPLICAS))
    new = [line[2:] for line in difflib.ndiff(local, spread) if line.startswith("+ ")]
    assert [line.split("#")[0].strip() for line in new] == [
        "import fddp, jax, jax.numpy as jnp, optax",
        "group = fddp.init()",
        "step = fddp.train_step(loss_fn, optimizer, group=group)",
        "state = step.init(params)",
        "for batch in batches(group.rank, group.processes):",
        "state, info = step(state, batch)",
        'print(f"loss {info.loss:.4f}")',
    ]


@pytest.mark.parametrize("script", MORE, ids=lambda script: script.split("fddp.")[-1].split("(")[0])
def test_the_other_scripts_run(script, tmp_path):
    (tmp_path / "script.py").write_text(script)
    runpy.run_path(str(tmp_path / "script.py"))


def test_ci_calls_the_readmes_test_command():
    (command,) = re.findall(r"^(pip install uv && uv run --all-extras pytest)", README, re.MULTILINE)
    # Quiet, but the same.
    assert command.replace("pip install", "pip install -q") in (ROOT / ".ci" / "run").read_text()


def test_every_name_of_fddp_in_the_readme_exists():
    for name in set(re.findall(r"\bfddp\.([A-Za-z_]+)\b(?!\.py)", README)):
        assert hasattr(fddp, name), name
