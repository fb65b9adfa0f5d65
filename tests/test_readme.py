"""The code of README and docs/ runs, prints the output that they show, and names only existing
things."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import chdir
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import pytest
from boxes import boxes
from processes import launch

import fddp
from fddp.step.foreign_options import ANSWERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
(PRINTED,) = re.findall(r"^`mpiexec -n 2 python train\.py` prints `([^`]*)`", README, re.MULTILINE)
(THE_DIFF,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
# A block that is a file of a test suite begins with its name; pytest runs it, below.
FILE = re.compile(r"\A# (\w+\.py)\n")
# Packages that pages use, and no extra of fddp installs: scripts with them run if they are present.
OTHERS = ("datasets", "haiku", "tensorflow", "torch")
# A script, and its output if the page shows it. A block next to a script is titled PyTorch or
# Horovod, and is theirs.
SCRIPTS = [
    pytest.param(script, printed, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, (script, printed) in enumerate(
        re.findall(
            r"```python(?: title=\"fddp\")?\n(.*?)```(?:\n\nprints\n\n```\n(.*?)```)?",
            page,
            re.DOTALL,
        )
    )
    if not FILE.match(script)
]
# Outputs that tests compare: of the README's script, scripts, and commands (test_examples.py).
COMPARED = {PRINTED} | {
    *(script.values[1] for script in SCRIPTS),
    *(box.output for page in PAGES.values() for box in boxes(page) if box.language == "bash"),
}
# Scripts as the lines that go and come: (before, after), which find the same.
CHANGES = [
    pytest.param(change, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, change in enumerate(re.findall(r"```diff\n(.*?)```", page, re.DOTALL))
]


def run_here(script: str, folder: Path) -> None:
    path = folder / "script.py"
    path.write_text(script)
    if "elastic=True" in script:  # this process is already in a job of another kind
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, path], cwd=folder, env=env, check=True, timeout=300)
        return
    with chdir(folder):
        runpy.run_path(str(path), run_name="__main__")


def imports(script: str, package: str) -> bool:
    return re.search(rf"^(from|import) (.*, )?{package}\b", script, re.MULTILINE) is not None


def side(sign: str, change: str = THE_DIFF) -> str:
    """One of the two scripts of a diff: '-' the one before, '+' the one after."""
    return "\n".join(line[2:] for line in change.splitlines() if line[:1] in ("", " ", sign))


### README


def test_the_readme_has_at_most_130_lines():
    assert len(README.splitlines()) <= 130


def test_readme_and_first_page_name_the_supported_versions_of_python_and_jax():
    """JAX's upper bound is exclusive: `<0.13` is 0.12."""
    (jax,) = (text for text in PROJECT["dependencies"] if text.startswith("jax>"))
    least, limit = re.findall(r"0\.(\d+)", jax)
    pythons = [
        text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)
    ]
    versions = f"Python {pythons[0]} to {pythons[-1]}, JAX 0.{least} to 0.{int(limit) - 1}, "
    for page in (README, PAGES["index.md"]):
        assert f"Linux, {versions}{PROJECT['license']}." in page


def test_the_readmes_table_has_every_extra_and_its_packages():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", README, re.MULTILINE)
    shown = [name for extras, _ in rows for name in re.findall(r"\w+", extras)]
    assert sorted(shown) == sorted(PROJECT["optional-dependencies"])
    mpi = {re.split(r"[\[<>=]", text)[0] for text in PROJECT["optional-dependencies"]["mpi"]}
    assert {extras: set(text.split(", ")) for extras, text in rows}["`mpi`"] == mpi


def test_the_first_page_shows_the_readmes_script_and_output():
    page = PAGES["index.md"]
    assert f"```diff\n{THE_DIFF}```" in page
    assert f"`mpiexec -n 2 python train.py` prints `{PRINTED}`" in page


@pytest.mark.ranks
def test_the_distributed_script_prints_what_the_readme_and_the_local_script_say(tmp_path, capsys):
    run_here(side("-"), tmp_path)
    assert capsys.readouterr().out.strip() == PRINTED
    script = tmp_path / "train.py"
    script.write_text(side("+"))
    outcome = launch("mpi", 2, script, folder=tmp_path)
    assert outcome.succeeded, outcome.outputs
    assert [output.strip() for output in outcome.outputs] == [PRINTED, ""]


def test_the_distributed_script_differs_in_a_few_lines_and_not_in_the_loss():
    new = [line[2:] for line in THE_DIFF.splitlines() if line.startswith("+ ")]
    assert [line.split("#")[0].strip() for line in new] == [
        "import fddp, jax, jax.numpy as jnp, optax",
        "group = fddp.init()",
        "step = fddp.train_step(loss_fn, optimizer, group=group)",
        "state = step.init(params)",
        "for batch in batches(group.rank, group.processes):",
        "state, info = step(state, batch)",
        'group.print(f"loss {info.loss:.4f}")',
    ]


def test_ci_calls_the_readmes_test_command():
    (command,) = re.findall(
        r"^(pip install uv && uv run --all-extras pytest)", README, re.MULTILINE
    )
    # Quiet, but the same.
    assert command.replace("pip install", "pip install -q") in (ROOT / ".ci" / "run").read_text()


def test_the_readme_links_to_eight_pages_of_which_one_is_the_first():
    section = README.partition("\n## Next\n")[2].partition("\n## ")[0]
    pages = re.findall(r"\]\(([^)]*)\)", section)
    assert len(pages) == 8 and pages[-1] == "docs/index.md"


### docs/


def test_every_page_has_a_link_from_another():
    for name in PAGES:
        others = [page for other, page in PAGES.items() if other != name]
        assert any(re.search(rf"\]\({name}[#)]", page) for page in others), name


@pytest.mark.steps
@pytest.mark.parametrize("script, printed", SCRIPTS)
def test_the_scripts_of_the_pages_run_and_print_what_they_say(script, printed, tmp_path, capsys):
    compile(script, "script.py", "exec")
    absent = [name for name in OTHERS if imports(script, name) and find_spec(name) is None]
    if absent:
        pytest.skip(f"{', '.join(absent)} is not installed: only the syntax was checked")
    run_here(script, tmp_path)
    assert not printed or capsys.readouterr().out == printed


@pytest.mark.ranks
def test_pytest_passes_the_files_of_the_page_on_testing(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", PAGES["testing.md"], re.DOTALL)
    files = {name: script for script in scripts for name in FILE.findall(script)}
    assert list(files) == ["conftest.py", "test_training.py"]
    for name, script in files.items():
        (tmp_path / name).write_text(script)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert "3 passed" in completed.stdout, completed.stdout + completed.stderr


@pytest.mark.steps
@pytest.mark.parametrize("change", CHANGES)
def test_a_script_of_the_pages_prints_the_same_before_and_after(change, tmp_path, capsys):
    printed = []
    for sign in "-+":
        run_here(side(sign, change), tmp_path)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].strip()


@pytest.mark.parametrize("page", [README, *PAGES.values()], ids=["README.md", *PAGES])
def test_every_output_of_a_page_is_compared(page):
    assert [box.output for box in boxes(page) if box.output not in COMPARED] == []


### Names


@pytest.mark.parametrize("page", [README, *PAGES.values()], ids=["README.md", *PAGES])
def test_every_name_of_fddp_exists(page):
    for name in set(re.findall(r"\bfddp\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\b(?!\.py)", page)):
        attrgetter(name)(fddp)


@pytest.mark.parametrize("page", [README, *PAGES.values()], ids=["README.md", *PAGES])
def test_every_name_of_a_group_and_a_step_exists(page):
    """Also in scripts that need a package which is not installed."""
    names = {*dir(fddp.Group), *fddp.Group.__dataclass_fields__}
    assert set(re.findall(r"(?<![\w./])group\.([a-z_]+)\b", page)) - names == set()
    assert set(re.findall(r"(?<![\w./])step\.([a-z_]+)\b", page)) - {*dir(fddp.TrainStep)} == set()


def test_the_pages_name_every_option_of_other_libraries_that_an_error_answers():
    page = PAGES["from-horovod.md"] + PAGES["from-pytorch.md"]
    assert [name for name in ANSWERS if not re.search(rf"\b{name}\b", page)] == []


@pytest.mark.parametrize("page", [README, *PAGES.values()], ids=["README.md", *PAGES])
def test_every_file_and_test_exists(page):
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    # `bench/overlap.py`, and the same inside a command; a test is named without its folder.
    files = {
        file
        for span in re.findall(r"`([^`\n]+)`", text)
        for file in re.findall(r"[\w./-]+/[\w-]+\.\w+", span)
    }
    assert [
        file for file in files if not (ROOT / file).exists() and not (ROOT / "fddp" / file).exists()
    ] == []
    tests = set(re.findall(r"`(test_\w+)`", text))
    assert [test for test in tests if not list((ROOT / "tests").rglob(f"{test}.py"))] == []


### The house


def test_the_hour_names_its_files_and_the_door_of_every_room():
    hour = PAGES["architecture.md"].partition("## The hour")[2].partition("\n## ")[0]
    files = [str(path.relative_to(ROOT / "fddp")) for path in (ROOT / "fddp").rglob("*.py")]
    rows = re.findall(r"^\| `([\w/]+\.py)` \|.*\| ([^|]*) \|$", hour, re.MULTILINE)
    doors = dict(re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)`", hour, re.MULTILINE))
    assert {path for path, _ in rows} | set(doors.values()) <= set(files)
    lines = [len((ROOT / "fddp" / path).read_text().splitlines()) for path, _ in rows]
    assert len(lines) == 12 and sum(lines) <= 1800
    for path, names in rows:
        code = (ROOT / "fddp" / path).read_text()
        for name in re.findall(r"`([\w.]+)`", names):
            assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", code), (path, name)
    assert set(doors) == {path.parent.name for path in (ROOT / "fddp").glob("*/__init__.py")} - {
        "jax_internals"
    }
    assert all(path.startswith(f"{room}/") for room, path in doors.items())


def test_the_table_of_imports_is_the_contract():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    rows = dict(
        re.findall(r"^\| `([\w./]+)` \| (`[^|]*`) \|$", PAGES["architecture.md"], re.MULTILINE)
    )
    for rule in (
        rule for rule in contract if rule["type"] == "forbidden" and " alone" in rule["name"]
    ):
        (room,) = rule["source_modules"]
        may = set(re.findall(r"`(\w+)`", rows[room.partition(".")[2].replace(".", "/")]))
        assert not may & {name.partition(".")[2] for name in rule["forbidden_modules"]}, room
        assert may == set(re.findall(r"[a-z]+", rule["name"].partition("imports")[2])) - {
            "and",
            "alone",
        }, room


def test_the_path_of_a_step_is_the_rooms_that_it_imports():
    """Each of the drawing's rooms, from the first to the last, is imported by its caller."""
    (drawing,) = re.findall(
        r"From the call of a step.*?```\n(.*?)```", PAGES["architecture.md"], re.DOTALL
    )
    drawn = re.findall(r"^[ │├└─]*([\w/]+)/ ", drawing, re.MULTILINE)
    assert drawn == ["step/schedules", "losses", "buckets", "hooks", "optim"]
    code = "".join(
        (ROOT / "fddp" / "step" / name).read_text()
        for name in ("settle.py", "replica.py", "strategy.py")
    )
    assert all(f"from fddp.{room.replace('/', '.')} import" in code for room in drawn)
