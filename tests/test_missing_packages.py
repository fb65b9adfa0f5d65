"""An error about a missing package names a package that an index has: fddp is on none."""

import re
from collections.abc import Callable
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path

import numpy as np
import optax
import pytest

import fddp
from fddp.__main__ import main
from fddp.runtime import mpi_vendors
from fddp.runtime.join_mpi import agree_on_coordinator
from fddp.runtime.launchers import read_launch

ROOT = Path(__file__).parents[1]


def test_no_text_of_the_library_advises_to_install_fddp_or_an_extra():
    advice = re.compile(r"""install '?fddp\b|fddp\[|extra ['"]""")
    sources = list((ROOT / "fddp").rglob("*.py"))
    assert sources and [path.name for path in sources if advice.search(path.read_text())] == []


def test_ranks_of_mpiexec_without_mpi4py_name_it(monkeypatch: pytest.MonkeyPatch):
    launch = read_launch({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"or pip install mpi4py; without MPI, python -m fddp run"):
        agree_on_coordinator(launch)


def test_run_by_mpiexec_without_one_names_mpich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("fddp.runtime.commands.loaded", lambda: (None, ""))
    monkeypatch.setattr(mpi_vendors, "_programs", lambda names: [])
    assert main(["run", "-n", "2", "--by", "mpiexec", str(tmp_path / "train.py")]) == 2
    assert "mpiexec is not installed here: pip install mpich, or use" in capsys.readouterr().err


@pytest.mark.steps
def test_a_checkout_that_is_not_installed_trains(
    group: Callable[[int], fddp.Group], monkeypatch: pytest.MonkeyPatch
):
    def no_distribution(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    def loss_fn(w, x):
        return ((x @ w) ** 2).mean()

    monkeypatch.setattr("importlib.metadata.distribution", no_distribution)
    step = fddp.train_step(loss_fn, optax.sgd(0.1), group=group(2))
    _, info = step(step.init(np.ones(3, np.float32)), np.ones((4, 3), np.float32))
    assert float(info.loss) == 9


@pytest.mark.steps
def test_doctor_advises_no_installation_of_fddp_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def version_of(name: str) -> str:
        if name == "fddp":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("fddp.runtime.packages.version", version_of)
    monkeypatch.setattr(mpi_vendors, "loaded", lambda: ("MPICH", ""))
    assert main(["doctor"]) == 0
    assert re.search(r"^fddp +a checkout, not installed$", capsys.readouterr().out, re.MULTILINE)
