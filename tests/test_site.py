"""The pages as a site: its nav has every page, its API every public name, every link a target, and
it builds."""

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import fddp

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
API = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
# The columns of docs/site.css for a block of code, and for one of two blocks side by side.
COLUMNS = 101
COLUMNS_BESIDE = 48
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "bench" / "README.md", ROOT / "CONTRIBUTING.md"]


def leaves(nav: Any) -> list[str]:
    """The pages that a nav names, or a part of it."""
    if isinstance(nav, str):
        return [nav]
    return [
        page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in leaves(entry)
    ]


def anchors(page: Path) -> set[str]:
    """The anchors of its headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_the_nav_has_every_page_once():
    named = leaves(NAV)
    assert sorted(name for name in named if not name.startswith("../")) == sorted(
        path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")
    )
    assert all((DOCS / name).is_file() for name in named)


def test_the_api_has_every_public_name_once():
    names = {name: getattr(fddp, name) for name in dir(fddp)}
    public = [name for name, x in names.items() if getattr(x, "__module__", "").startswith("fddp.")]
    rooms = {name: x.__name__ for name, x in names.items() if inspect.ismodule(x)}
    assert rooms == {name: f"fddp.{name}" for name in rooms}, "a module shows that is no room"
    assert sorted(re.findall(r"^::: fddp\.(\w+)$", API, re.MULTILINE)) == sorted([*public, "hooks"])


def test_every_public_field_says_what_it_is():
    """A docstring below it describes it, or an entry among the `Attributes:` of its class."""
    nodes = (
        node
        for path in (ROOT / "fddp").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    )
    public = set(re.findall(r"^::: fddp\.(\w+)$", API, re.MULTILINE))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in public]
    assert len(classes) > 15
    silent = [
        f"{class_node.name}.{ast.unparse(field.target)}"
        for class_node in classes
        for field, below in zip(class_node.body, [*class_node.body[1:], None])
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_")
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant))
        if f"{ast.unparse(field.target)} (" not in (ast.get_docstring(class_node) or "")
    ]
    assert silent == []


def test_the_api_has_every_hook():
    functions = inspect.getmembers(fddp.hooks, inspect.isfunction)
    rendered = {
        name for name, make in functions if inspect.signature(make).return_annotation is fddp.Hook
    }
    (listed,) = re.findall(
        r"^::: fddp\.hooks\n.*?members: \[(.*?)\]", API, re.DOTALL | re.MULTILINE
    )
    assert set(listed.split(", ")) == rendered


def test_a_name_of_fddp_in_a_docstring_exists():
    """A page links to it."""
    sources = "".join(path.read_text() for path in (ROOT / "fddp").rglob("*.py"))
    named = set(re.findall(r"`fddp\.(\w+)`", sources))
    assert {"Options", "whole"} <= named and [
        name for name in named if not hasattr(fddp, name)
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        to = page.parent / target if target else page
        assert to.is_file(), target
        assert not anchor or anchor in anchors(to), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_block_of_a_page_scrolls_sideways(page):
    """The window has 1,280 pixels; blocks with a title stand side by side."""
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    room = [
        (COLUMNS_BESIDE if "title=" in kind else COLUMNS, text.splitlines())
        for kind, text in blocks
    ]
    assert [line for columns, lines in room for line in lines if len(line) > columns] == []


### The first page


def test_the_first_picture_shows_the_measured_stages():
    traffic = runpy.run_path(str(DOCS / "traffic.py"))
    serial, under = traffic["steps"]()
    assert traffic["PICTURE"].read_text() == traffic["drawing"](serial, under)
    tuned = measured("tuning")["mlp, gloo"]
    (cap,) = (row for row in tuned["caps"] if row["cap_mb"] == tuned["chosen_mb"])
    assert 1e3 * under.seconds == pytest.approx(cap["predicted_ms"])
    page = (DOCS / "index.md").read_text()
    for ms in (1e3 * serial.seconds, 1e3 * under.seconds, cap["measured_ms"]):
        assert f" {ms:.0f} ms" in page


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("MLP of 640 rows", "mlp640"),
        ("GPT", "gpt"),
        ("MLP of 1,024 rows", "mlp"),
        ("ResNet-18", "resnet18"),
    ],
)
def test_the_first_pages_table_says_what_was_measured(row, problem):
    (line,) = re.findall(rf"^\| {row}, .*$", (DOCS / "index.md").read_text(), re.MULTILINE)
    ms = {way: median for way, (_, median, _) in measured("eager")[problem]["step_ms"].items()}
    fddp_ms = [ms["fddp staged (Gloo)"], ms["fddp eager (Gloo)"]]
    ddp_ms = min(median for way, median in ms.items() if way.startswith("PyTorch DDP"))
    others_ms = [ms["jit, NamedSharding"], ms["alone, one program"], ms["PyTorch, alone"]]
    shown = re.findall(r"\d+", " ".join(line.split("|")[2:]))
    assert [int(number) for number in shown] == [
        round(milliseconds) for milliseconds in (*fddp_ms, ddp_ms, *others_ms)
    ]


def measured(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["results"]


### The site


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    """Covers all other faults of a page: mkdocs' own warnings are errors."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    completed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False
    )
    assert completed.returncode == 0, completed.stderr
    steps = (tmp_path / "api" / "step" / "index.html").read_text()
    assert (
        'id="fddp.whole"' in steps and 'id="fddp.whole.whole"' not in steps
    )  # the function, not its module
    assert 'id="fddp.TrainStep.init"' in steps and 'id="fddp.TrainStep.on"' not in steps  # internal
