"""A release: the contents of the two archives; the wheel alone is all of fddp."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UV = shutil.which("uv") or "uv"
# Of its own path and packages a new environment must not hear.
CLEAN = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
}
# The first uses on a user's machine, and those that need only the wheel: plans, steps on a mesh,
# two real processes.
SUBSET = ("tests/buckets", "tests/step/test_step.py", "tests/runtime/test_rendezvous.py")

built_with_uv = pytest.mark.skipif(
    shutil.which("uv") is None, reason="uv builds the archives: pip install uv"
)


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command; its last lines if it fails."""
    completed = subprocess.run(
        command, cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=900, check=False
    )
    assert completed.returncode == 0, (
        f"{command}:\n{completed.stdout[-6000:]}\n{completed.stderr[-6000:]}"
    )
    return completed.stdout


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("built")
    run(UV, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    return folder


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


### Versions


def test_the_changelog_begins_with_this_version_and_is_one_page():
    text = (ROOT / "CHANGELOG.md").read_text()
    first = re.findall(r"^## (.*)$", text, re.MULTILINE)[0]
    assert re.fullmatch(re.escape(PROJECT["version"]) + r" - (not released|\d{4}-\d\d-\d\d)", first)
    assert len(text.splitlines()) <= 80


def test_the_page_says_which_jax_and_python_are_supported():
    page = (ROOT / "docs" / "installing.md").read_text()
    (jax,) = (
        requirement for requirement in PROJECT["dependencies"] if requirement.startswith("jax>")
    )
    pythons = [
        classifier.rpartition(" ")[2]
        for classifier in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", classifier)
    ]
    assert f"| JAX | `{jax}` |" in page and f"| Python | {', '.join(pythons)} |" in page


### Contents of the archives


@pytest.mark.steps
@built_with_uv
def test_the_wheel_holds_the_packages_files_and_nothing_else(built):
    listed = subprocess.run(
        ["git", "ls-files", "fddp"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    info = f"fddp-{PROJECT['version']}.dist-info"
    described = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    contents = members(only(built, f"fddp-{PROJECT['version']}-py3-none-linux_*.whl"))
    assert set(contents) == set(listed.split()) | described | {"fddp/comm/liblane.so"}
    assert "fddp/py.typed" in contents
    assert contents["fddp/__init__.py"] == (ROOT / "fddp" / "__init__.py").read_bytes()


@pytest.mark.steps
@built_with_uv
def test_the_source_archive_builds_the_wheel_that_the_checkout_builds(built, tmp_path):
    run(UV, "build", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT, cwd=tmp_path)
    assert members(only(built, "*.whl")) == members(only(tmp_path, "*.whl"))
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        top = {Path(name).parts[1] for name in archive.getnames()}
    assert {"fddp", "tests", "models", "docs", "LICENSE", "README.md", "pyproject.toml"} <= top
    assert not {".venv", ".git", "runs", "site"} & top


### The page of a package index


@pytest.mark.steps
@built_with_uv
@pytest.mark.quick("")
@pytest.mark.parametrize("repository", ["", "https://example.org/us/fddp"])
def test_an_index_page_links_to_the_versions_files_if_there_is_a_repository(
    built, tmp_path, repository
):
    page = index_page(with_repository(repository, built, tmp_path))
    links = [
        f"{repository}/blob/v{PROJECT['version']}/{file}"
        for file in re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text())
    ]
    assert "Quickstart" in page and len(links) > 8
    assert re.findall(r"\]\(([^)]*)\)", page) == (links if repository else [])


def with_repository(repository: str, built: Path, folder: Path) -> Path:
    """The wheel of a source archive whose settings name the repository."""
    with tarfile.open(only(built, "*.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    setting = re.compile(r'^repository = ".*"$', re.MULTILINE)
    settings = (source / "pyproject.toml").read_text()
    changed, count = setting.subn(f'repository = "{repository}"', settings)
    assert count == 1
    if changed == settings:
        return only(built, "*.whl")
    (source / "pyproject.toml").write_text(changed)
    (source / "PKG-INFO").unlink()  # it holds the page that the source archive was built with
    run(UV, "build", "--quiet", "--wheel", "--out-dir", folder, source, cwd=folder)
    return only(folder, "*.whl")


def index_page(wheel: Path) -> str:
    """The text that a package index shows: the body of the wheel's metadata."""
    (metadata,) = (text for name, text in members(wheel).items() if name.endswith("/METADATA"))
    return metadata.decode().partition("\n\n")[2]


### The wheel


@built_with_uv
@pytest.mark.slow
def test_the_wheel_alone_passes_the_tests(built, tmp_path):
    """The environment holds nothing else of fddp, and the folder only its tests and models."""
    python = tmp_path / "environment" / "bin" / "python"
    run(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "environment", cwd=tmp_path)
    tools = [f"{name}=={version(name)}" for name in ("pytest", "pytest-xdist", "hypothesis", "jax")]
    run(
        UV,
        "pip",
        "install",
        "--quiet",
        "--python",
        python,
        only(built, "*.whl"),
        *tools,
        cwd=tmp_path,
    )
    for name in ("tests", "models"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # how pytest is called
    assert run(python, "-m", "fddp", "--version", cwd=tmp_path) == f"fddp {PROJECT['version']}\n"
    assert run(python, "-m", "fddp", "doctor", cwd=tmp_path)
    installed = Path(run(python, "-c", "import fddp; print(fddp.__file__)", cwd=tmp_path).strip())
    assert installed.is_relative_to(tmp_path / "environment")
    assert re.search(r"\d+ passed", run(python, "-m", "pytest", "-n", "2", *SUBSET, cwd=tmp_path))
