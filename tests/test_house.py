"""The house: who imports whom, small modules, documented names, and no trace of one machine."""

import ast
import importlib
import inspect
import os
import pydoc
import re
import rlcompleter
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest
import yaml

import fddp

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted((ROOT / "fddp").rglob("*.py"))


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module(path: Path) -> str:
    """A module's name below the package."""
    return ".".join(path.relative_to(ROOT / "fddp").with_suffix("").parts)


def matches(pattern: re.Pattern[str], paths: Iterable[Path]) -> list[str]:
    """The places and texts of a pattern's matches in some files."""
    return [
        f"{names(path)}: {match[0]}"
        for path in paths
        for match in pattern.finditer(path.read_text())
    ]


def imports(path: Path) -> set[str]:
    """Modules of fddp that a file imports, wherever it does; '' stands for the package itself."""
    imported = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{names(path)} imports relatively"
            from_package = node.module == "fddp"  # from fddp import flat
            imported |= (
                {f"fddp.{alias.name}" for alias in node.names}
                if from_package
                else {node.module or ""}
            )
    return {name.partition(".")[2] for name in imported if name.split(".")[0] == "fddp"}


### Imports


def test_rooms_import_as_the_contract_says():
    linter = Path(sys.executable).with_name("lint-imports")
    completed = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout[completed.stdout.find("Broken contracts") :]


def test_every_room_is_in_the_contract_and_says_what_it_is():
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {name.strip() for layer in layers for name in layer.split("|")}
    rooms = {path.parent.name for path in (ROOT / "fddp").glob("*/__init__.py")}
    assert rooms == named - {"__main__"}
    for room in rooms:
        first = inspect.getdoc(importlib.import_module(f"fddp.{room}")) or ""
        assert "This room imports" in first or "imports this room" in first, room


@pytest.mark.steps
def test_fddp_loads_neither_flax_nor_an_observer_before_it_is_asked():
    loaded = (
        "import fddp, sys; print([name for name in ('flax', 'matplotlib', 'fddp.analysis') if name "
        "in sys.modules])"
    )
    completed = subprocess.run(
        [sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_models_know_nothing_of_the_library_but_the_users_scripts():
    users = [path for path in (ROOT / "models").rglob("*.py") if imports(path)]
    assert (
        users
        and [path.name for path in users if '__name__ == "__main__"' not in path.read_text()] == []
    )


def test_one_room_reads_what_jax_does_not_promise():
    inside = re.compile(
        r"jax\._src|\beqn\.(params|effects)|Jaxpr\(|\bVar\(|debug_info|jaxprs_in_params|jaxpr\.replace|ProfileData"
    )
    outside = [path for path in MODULES if not module(path).startswith("jax_internals")]
    assert matches(inside, outside) == []


CORE = [
    path
    for path in MODULES
    if path.parent.name == "step" and path.stem not in ("options", "combinations")
]


def test_the_core_never_asks_of_which_kind_a_step_is():
    """It is given a `Strategy`; options are checked where they are given, and picked from in
    `training`."""
    kind = re.compile(r"\bif\b[^\n\"]*(virtual_replicas|local_steps|LocalSteps|\.shard\b)")
    assert matches(kind, CORE) == []


### Modules


def test_a_module_is_one_documented_idea_of_at_most_300_lines():
    ideas = {"utils", "util", "base", "common", "helpers", "misc"}
    assert [names(path) for path in MODULES if path.stem in ideas] == []
    assert [names(path) for path in MODULES if len(path.read_text().splitlines()) > 300] == []
    assert [
        names(path) for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_no_two_rooms_have_a_module_of_one_name():
    stems = [path.stem for path in MODULES if path.stem != "__init__"]
    assert sorted(stem for stem in set(stems) if stems.count(stem) > 1) == []


def test_no_check_disappears_under_python_O():
    trees = {names(path): ast.walk(ast.parse(path.read_text())) for path in MODULES}
    asserts = [
        f"{path}:{node.lineno}"
        for path, nodes in trees.items()
        for node in nodes
        if isinstance(node, ast.Assert)
    ]
    assert asserts == []


### Public names

PUBLIC = {name: getattr(fddp, name) for name in dir(fddp) if name != "hooks"}
# Members that completion offers.
STEP = [
    *("finish", "group", "init", "lower", "no_sync", "optimizer", "options", "plan", "shapes"),
    *("timeline", "with_options"),
]
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
METHODS = {
    f"{name}.{method}": value
    for name, kind in PUBLIC.items()
    if inspect.isclass(kind)
    for method, value in vars(kind).items()
    if inspect.isfunction(value) and (method == "__call__" or not method.startswith("_"))
    if value.__module__.startswith("fddp")
}


def test_init_imports_every_public_name_by_name():
    for node in ast.walk(ast.parse((ROOT / "fddp" / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fddp"):
            assert all(alias.name == alias.asname for alias in node.names)
    assert {"init", "train_step", "value_and_grad", "make_plan", "all_reduce", "grad_order"} <= set(
        FUNCTIONS
    )


def test_completion_offers_public_names_alone(group):
    step = fddp.train_step(lambda w, x: jnp.mean(w * x), optax.sgd(0.1), group=group(1))
    namespace = {"fddp": fddp, "step": step, "group": step.group}
    completer = rlcompleter.Completer(namespace)
    offered = {name: set[str]() for name in namespace}
    for name, words in offered.items():
        number = 0
        while (word := completer.complete(f"{name}.", number)) is not None:
            words.add(re.sub(r"\(\)?$", "", word.removeprefix(f"{name}.")))
            number += 1
        assert words == {word for word in dir(namespace[name]) if not word.startswith("_")}
    assert offered["fddp"] == {*PUBLIC, "hooks"}
    assert sorted(offered["step"]) == STEP


def test_help_of_fddp_lists_every_public_name_once_in_a_group():
    groups = dict(re.findall(r"^([A-Z][a-z ]+): (.*)$", inspect.getdoc(fddp) or "", re.MULTILINE))
    assert list(groups) == [
        "Start",
        "Train",
        "Losses",
        "Optimizers",
        "Data",
        "Hooks",
        "Buckets",
        "Look inside",
    ]
    assert sorted(", ".join(groups.values()).split(", ")) == sorted([*PUBLIC, "hooks"])


def test_a_public_name_says_what_it_is():
    texts = {name: value.__doc__ or "" for name, value in PUBLIC.items()}
    # The docstrings that Python makes up for dataclasses and named tuples repeat the signature.
    assert [name for name, text in texts.items() if not text or text.startswith(f"{name}(")] == []


def undocumented(name: str, function: Callable[..., object]) -> list[str]:
    """The parts of a function's docstring that are missing: its sections, and its arguments."""
    signature = inspect.signature(function)
    text = inspect.getdoc(function) or ""
    args = [p for p in signature.parameters if p != "self"]
    if not text or not args:
        return [] if text else [f"{name}: docstring"]
    sections = ["Args:"] if signature.return_annotation in (None, "None") else ["Args:", "Returns:"]
    missing = [section for section in sections if section not in text]
    listed = text.partition("Args:")[2]
    missing += [p for p in args if not re.search(rf"^ *\**{p}:|\b{p}:", listed, re.MULTILINE)]
    excepted = {("all_reduce", "axis_name")}  # described with `group`, its alternative
    return [f"{name}: {part}" for part in missing if (name, part) not in excepted]


def test_a_function_says_what_it_takes_and_gives():
    missing = [undocumented(name, f) for name, f in (FUNCTIONS | METHODS).items()]
    assert [part for sections in missing for part in sections] == []


def test_help_explains_every_option_with_its_default():
    missing = []
    for name in ("Options", "train_step", "value_and_grad"):
        text = re.sub(r"\n[ |]+", " ", pydoc.plain(pydoc.render_doc(getattr(fddp, name))))
        missing += [
            f"{name}: {option.name}"
            for option in fields(fddp.Options)
            if not re.search(rf" {option.name} \({re.escape(repr(option.default))}\): \S", text)
        ]
    assert missing == []


### The package


def test_the_package_is_described_without_a_person_or_a_host():
    project = PYPROJECT["project"]
    assert (
        project["description"]
        and project["keywords"]
        and "Typing :: Typed" in project["classifiers"]
    )
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "Copyright 2026 The fddp authors" in text
    assert not {"authors", "maintainers", "urls"} & set(project)


def test_the_package_is_typed_and_a_source_archive_is_sources():
    """Hatchling takes all files of folders but caches, and LICENSE and pyproject.toml by itself."""
    wheel, source = (
        PYPROJECT["tool"]["hatch"]["build"]["targets"][name] for name in ("wheel", "sdist")
    )
    assert (ROOT / "fddp" / "py.typed").is_file() and wheel["packages"] == ["fddp"]
    assert set(source["only-include"]) == {
        "fddp",
        "models",
        "tests",
        "bench",
        "docs",
        "CHANGELOG.md",
        "README.md",
        "hatch_build.py",
    }
    assert source["exclude"] == ["bench/results"]


def test_the_readme_has_no_picture_and_no_html_which_an_index_page_would_not_find():
    """`hatch_build.py` makes links to files absolute; it leaves pictures and HTML unchanged."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert re.findall(r"!\[|(?:src|href)=", text) == []


### The tests


def test_the_name_of_a_test_is_a_claim_of_at_most_80_characters():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]
    functions = [
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    assert [name for name in functions if name.startswith("test_") and len(name) > 80] == []


### The repository


def test_no_tracked_file_knows_one_machine():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tracked = [path for path in listed.splitlines() if (ROOT / path).is_file()]
    private = re.compile(
        r"/(work|home|root|Users)/|index[-_]url|//[^\s/]*(artifact|nexus|proxy|pypi\.(?!org))"
    )
    traces = []
    for path in tracked:
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:  # a picture
            continue
        traces += [f"{path}: {match[0]}" for match in private.finditer(text)]
    assert traces == []
    assert "uv.lock" not in tracked


def test_ci_calls_only_scripts_that_run_here():
    workflows = [
        yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")
    ]
    steps = [
        step for workflow in workflows for job in workflow["jobs"].values() for step in job["steps"]
    ]
    scripts = [step["run"].split()[0] for step in steps if "run" in step]
    assert set(scripts) == {f".ci/{path.name}" for path in (ROOT / ".ci").iterdir()}
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)
