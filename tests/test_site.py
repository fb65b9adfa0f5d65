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

import browser
import pytest
import yaml

import fddp
from bench import step_times
from bench.record import with_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
API = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
# The columns of docs/site.css for a block of code, and for one of two blocks side by side.
COLUMNS = 101
COLUMNS_BESIDE = 48
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "bench" / "README.md", ROOT / "CONTRIBUTING.md"]
ADDRESSES = {
    "FDDP_SITE_URL": "https://docs.example.org/fddp/",
    "FDDP_REPO_URL": "https://git.example.org/group/fddp",
    "FDDP_EDIT_URI": "edit/main/docs/",
}


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, without the values of its variables."""


Settings.add_constructor("!ENV", lambda loader, node: None)
NAV = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)["nav"]


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
    assert sorted(re.findall(r"^::: fddp\.(\w+)$", API, re.MULTILINE)) == sorted(dir(fddp))


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


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.relative_to(ROOT).as_posix()
)
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


def test_the_picture_of_the_traffic_shows_the_saved_timelines():
    traffic = runpy.run_path(str(DOCS / "traffic.py"))
    behind, under = traffic["steps"]()
    assert traffic["PICTURE"].read_text() == traffic["drawing"](behind, under)
    for page in traffic["PAGES"]:
        text = page.read_text()
        assert "](traffic.svg)" in text and traffic["with_lengths"](text, behind, under) == text


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("MLP, 640 rows", "mlp640"),
        ("GPT", "gpt"),
        ("MLP, 1,024 rows", "mlp"),
        ("ResNet-18", "resnet18"),
    ],
)
def test_the_first_pages_table_says_what_was_measured(row, problem):
    (line,) = re.findall(rf"^\| {row}, .*$", (DOCS / "index.md").read_text(), re.MULTILINE)
    ms = {way: median for way, (_, median, _) in measured("overlap")[problem]["step_ms"].items()}
    fddp_ms = [ms[f"fddp {way}"] for way in ("overlap (MPI)", "overlap (Gloo)", "eager (Gloo)")]
    ddp_ms = min(median for way, median in ms.items() if way.startswith("PyTorch DDP"))
    others_ms = [ms["jit, NamedSharding"], ms["alone (Gloo)"], ms["PyTorch, alone"]]
    shown = re.findall(r"\d+", " ".join(line.split("|")[2:]))
    assert [int(number) for number in shown] == [
        round(milliseconds) for milliseconds in (*fddp_ms, ddp_ms, *others_ms)
    ]


@pytest.mark.parametrize("page", step_times.PAGES, ids=lambda page: page.name)
def test_the_table_of_step_times_is_what_its_script_writes(page):
    text = page.read_text()
    table = step_times.table(json.loads(step_times.RESULTS.read_text()))
    assert table in text and with_table(text, table, step_times.MARK) == text


def measured(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["results"]


### Generated pages


def test_troubleshooting_is_generated_and_lists_only_messages_of_the_sources():
    script = runpy.run_path(str(DOCS / "troubleshooting.py"))
    assert script["unknown"]() == []
    assert "nothing has moved for … s: …" in script["sources"]()  # as a value is written
    assert "nothing has moved for … minutes" not in script["sources"]()
    assert script["PAGE"].read_text() == script["page"](), "run docs/troubleshooting.py"


### The site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; mkdocs' own warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


@pytest.mark.slow
def test_the_built_api_has_functions_and_public_members_alone(site):
    steps, groups = ((site / "api" / name / "index.html").read_text() for name in ("step", "comm"))
    assert 'id="fddp.train_step"' in steps and 'id="fddp.whole"' in steps
    # Functions, not the modules of their names.
    assert "doc-symbol-module" not in steps and 'id="fddp.whole.whole"' not in steps
    shown = re.findall(r'id="fddp\.TrainStep\.(\w+)"', steps)
    assert {"init", "__call__"} <= set(shown) <= {"__call__", *dir(fddp.TrainStep)}
    shown = re.findall(r'id="fddp\.Group\.(\w+)"', groups)
    public = [name for name in dir(fddp.init()) if not name.startswith("_")]
    assert sorted(shown) == public
    assert 'rel="canonical"' not in steps and 'rel="edit"' not in steps  # no addresses are set


@pytest.mark.slow
def test_a_published_site_links_to_its_repository_and_to_the_source_of_each_page(tmp_path):
    build(tmp_path, **ADDRESSES)
    site, repository = ADDRESSES["FDDP_SITE_URL"], ADDRESSES["FDDP_REPO_URL"]
    page = (tmp_path / "training" / "index.html").read_text()
    assert f'rel="canonical" href="{site}training/"' in page
    assert f'href="{repository}/edit/main/docs/training.md"' in page
    benchmarks = (tmp_path / "bench" / "index.html").read_text()
    assert f'href="{repository}/edit/main/bench/README.md"' in benchmarks
    documented = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"| `{name}` |" in documented and x in documented for name, x in ADDRESSES.items())


def build(folder: Path, **addresses: str) -> None:
    """Builds the site into a folder, strictly."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name not in ADDRESSES}
    completed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment | addresses, check=False
    )
    assert completed.returncode == 0, completed.stderr


### The site in a browser

BROWSER = pytest.mark.skipif(not browser.CHROMIUM, reason="chromium is not installed")
# Words that people search for.
WORDS = [
    *("pmap", "shard_map", "set_mesh", "device_put_replicated", "DistributedSampler", "LoRA"),
    *("mpiexec", "torchrun", "no_sync", "BatchNorm", "bucket_cap_mb", "Horovod", "EMA", "GAN"),
    *("Haiku", "nnx.Optimizer", "fine-tuning"),
]


def faults(site: Path, seen: dict[str, Any]) -> list[str]:
    """What a browser saw that a page should not have."""
    views = seen["views"]
    anchors = {view["path"]: view["anchors"] for view in views}
    found = {f"the search does not find {word}" for word in seen["missing"]}
    found |= {f"{path} is requested and does not exist" for path in seen["refused"]}
    for view in views:
        here = f"{view['path']} at {view['width']} pixels"
        found |= {f"{here}: {error}" for error in view["errors"]}
        if view["beyond"] > 0:
            found.add(f"{here}: {view['beyond']} pixels lie beyond its right edge")
        for link in view["links"]:
            path, _, anchor = link.partition("#")
            path += "index.html" if path.endswith("/") else ""
            there = (
                anchor in ["", *anchors[path]] if path in anchors else (site / path[1:]).is_file()
            )
            if not there:
                found.add(f"{view['path']}: the link {link} leads nowhere")
    return sorted(found)


@BROWSER
@pytest.mark.slow
def test_the_site_shows_no_fault_in_a_browser(site, tmp_path):
    seen = browser.report(site, tmp_path, widths=(1280, 420), words=WORDS)
    assert len(seen["views"]) > 60 and faults(site, seen) == []


@BROWSER
@pytest.mark.slow
def test_the_browser_sees_the_faults_of_a_page(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text(
        """<head></head><body><script>console.error("said"); undefined.name</script>
        <div style="width: 500px">wide</div> <img src="no.png"> <a href="no/">a</a>
        <a href="#no">b</a> <a href="#yes" id="yes">c</a>
        <ul class="md-search-result__list"><li>word</li></ul>"""
    )
    seen = browser.report(tmp_path / "site", tmp_path, (1280, 420), ["word", "absent"], limit_s=120)
    shown = "\n".join(faults(tmp_path / "site", seen))
    for fault in (
        "the search does not find absent",
        "/no.png is requested and does not exist",
        "pixels: said",
        "undefined",
        "cannot load http",
        "at 420 pixels: 88 pixels lie beyond",
        "the link /no/ leads nowhere",
        "the link /index.html#no leads nowhere",
    ):
        assert fault in shown
    for sound in ("find word", "#yes", "1280 pixels: 88"):
        assert sound not in shown
