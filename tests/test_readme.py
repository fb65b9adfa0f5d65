"""The code of README and docs/ runs, prints the output that they show, and names only existing
things."""

import re
import runpy
import tomllib
from contextlib import chdir
from operator import attrgetter
from pathlib import Path

import pytest
from processes import launch

import fddp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
(FIRST,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(PRINTED,) = re.findall(r"```\n(2 replicas.*?)```", README, re.DOTALL)
(THE_DIFF,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
# A script, and its output if the page shows it. A block next to a script is titled PyTorch, and
# PyTorch's.
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
]
# Scripts as the lines that go and come: (before, after), which find the same.
CHANGES = [
    pytest.param(change, id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, change in enumerate(re.findall(r"```diff\n(.*?)```", page, re.DOTALL))
]


# Runs scripts one after the other, each in a namespace of its own, and separates what they print.
ALL = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    print("END")
"""


def run_here(script: str, folder: Path) -> None:
    path = folder / "script.py"
    path.write_text(script)
    with chdir(folder):
        runpy.run_path(str(path), run_name="__main__")


def side(sign: str, change: str = THE_DIFF) -> str:
    """One of the two scripts of a diff: '-' the one before, '+' the one after."""
    return "\n".join(line[2:] for line in change.splitlines() if line[:1] in ("", " ", sign))


### README


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The output of each of two ranks of MPI, by script: the first one, and the one of the diff."""
    folder = tmp_path_factory.mktemp("readme")
    scripts = {"first.py": FIRST, "diff.py": side("+")}
    for name, script in {"all.py": ALL, **scripts}.items():
        (folder / name).write_text(script)
    paths = [folder / name for name in ("all.py", *scripts)]
    outcome = launch("mpi", 2, *paths, folder=folder)
    assert outcome.succeeded, outcome.outputs
    *by_script, errors = zip(*(output.split("END\n") for output in outcome.outputs))
    assert errors == ("", "")
    return {name: [text.strip() for text in texts] for name, texts in zip(scripts, by_script)}


def test_the_readme_has_at_most_160_lines():
    assert len(README.splitlines()) <= 160


@pytest.mark.ranks
def test_the_first_script_prints_what_the_readme_says(printed):
    assert printed["first.py"] == [PRINTED.strip(), ""]


def test_the_first_script_has_at_most_twenty_lines():
    assert len([line for line in FIRST.splitlines() if line.strip()]) <= 20


@pytest.mark.ranks
def test_a_local_script_and_its_distributed_form_find_the_same_loss(printed, tmp_path, capsys):
    run_here(side("-"), tmp_path)
    local_output = capsys.readouterr().out.strip()
    assert printed["diff.py"] == [local_output, ""]


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


def test_the_readme_names_the_first_page_and_that_leads_to_every_other():
    assert "`docs/index.md`" in README
    assert [
        name for name in PAGES if name != "index.md" and f"]({name})" not in PAGES["index.md"]
    ] == []


### docs/


@pytest.mark.steps
@pytest.mark.parametrize("script, printed", SCRIPTS)
def test_the_scripts_of_the_pages_run_and_print_what_they_say(script, printed, tmp_path, capsys):
    run_here(script, tmp_path)
    assert not printed or capsys.readouterr().out == printed


@pytest.mark.steps
@pytest.mark.parametrize("change", CHANGES)
def test_a_script_of_the_pages_prints_the_same_before_and_after(change, tmp_path, capsys):
    printed = []
    for sign in "-+":
        run_here(side(sign, change), tmp_path)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].strip()


def test_the_lines_of_the_examples_stand_in_their_scripts():
    sections = PAGES["examples.md"].split("\n## ")[2:]  # the first one is shown on another page
    assert len(sections) == 8
    for section in sections:
        (script,) = set(re.findall(r"models/\w+\.py", section))
        code = {line.strip() for line in (ROOT / script).read_text().splitlines()}
        (shown,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
        assert [line for line in shown.splitlines() if line.strip() not in code | {""}] == [], (
            script
        )


### Names


@pytest.mark.parametrize("page", [README, *PAGES.values()], ids=["README.md", *PAGES])
def test_every_name_of_fddp_exists(page):
    for name in set(re.findall(r"\bfddp\.([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\b(?!\.py)", page)):
        attrgetter(name)(fddp)


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


def test_the_hour_names_thirteen_files_and_the_door_of_every_room():
    hour = PAGES["architecture.md"].partition("## The hour")[2].partition("\n## ")[0]
    files = [str(path.relative_to(ROOT / "fddp")) for path in (ROOT / "fddp").rglob("*.py")]
    rows = re.findall(r"^\| `(\w+/\w+\.py)` \|.*\| ([^|]*) \|$", hour, re.MULTILINE)
    doors = dict(re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)`", hour, re.MULTILINE))
    assert len(rows) == 13 and {path for path, _ in rows} | set(doors.values()) <= set(files)
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
    rows = dict(re.findall(r"^\| `(\w+)` \| (`[^|]*`) \|$", PAGES["architecture.md"], re.MULTILINE))
    for rule in (
        rule for rule in contract if rule["type"] == "forbidden" and " alone" in rule["name"]
    ):
        (room,) = rule["source_modules"]
        may = set(re.findall(r"`(\w+)`", rows[room.partition(".")[2]]))
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
    drawn = re.findall(r"^[ │├└─]*(\w+)/", drawing, re.MULTILINE)
    assert drawn == ["step", "schedules", "losses", "buckets", "hooks", "optim"]
    code = "".join(
        (ROOT / "fddp" / "step" / name).read_text()
        for name in ("settle.py", "replica.py", "way.py")
    )
    assert all(f"from fddp.{room} import" in code for room in drawn[1:])
