"""Replicas on parts of a batch arrive at the parameters of one device with all of it.

Five steps of every model, by SGD with momentum in float32 and by AdamW in float64, on eight
replicas in this process and on two to four processes under MPI and Gloo. The other side is plain
JAX and optax (`workers/trainings.py`).
"""

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from processes import JOBS, Outcome, case, launch, selected
from workers import trainings
from workers.train_all import QUICK, RUNS, Run, runs, train

import fddp

pytestmark = pytest.mark.steps


def assert_equivalent(result: trainings.Result, run: Run) -> None:
    expected = trainings.on_one_device(run.model, run.rule)
    assert jax.tree.map(form, result) == jax.tree.map(form, expected)
    assert trainings.relative_error(result, expected) <= trainings.RULES[run.rule].tolerance


def form(x: Any) -> tuple[Any, ...]:
    return x.shape, x.dtype


### Eight replicas in this process


def in_this_process(run: Run) -> ParameterSet:
    """Other schedules of the models, and SGD on the MLP, run on processes: in this process they are
    slow."""
    quick = run.schedule == "overlap" and (run.rule == "adamw" or run.model == "mlp")
    return pytest.param(run, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.quick(
    "resnet-bn-adamw-overlap",
    "gpt-adamw-overlap-2_micro_batches",
    "mlp-adamw-overlap",
    "mlp-sgd-overlap",
)
@pytest.mark.parametrize("run", [in_this_process(run) for run in RUNS], ids=str)
def test_eight_replicas_end_where_one_device_does(run: Run, group: Callable[[int], fddp.Group]):
    with trainings.precision(run.rule):
        result = train(group(8), run, trainings.start(run.model, run.rule))
        assert_equivalent(jax.device_get(result), run)
    for array in jax.tree.leaves(result):
        copies = {np.asarray(shard.data).tobytes() for shard in array.addressable_shards}
        assert len(array.addressable_shards) == 8
        assert len(copies) == 1, "replicas must end bit for bit equal"


def test_the_references_have_moved_from_their_start():
    expected = trainings.on_one_device("gpt", "sgd")
    moved = jax.tree.map(
        lambda a, b: np.max(np.abs(a - b)), expected.params, trainings.start("gpt", "sgd")[0]
    )
    assert min(jax.tree.leaves(moved)) > 1e-4
    assert len(set(expected.losses.tolist())) == trainings.STEPS


@pytest.mark.parametrize(
    ("zeros", "ones", "error"),
    [(0.0, 1.0, 0.0), (1e-30, 1.0, np.inf), (0.0, 1.5, 0.5), (0.0, np.nan, np.nan)],
)
def test_an_error_is_relative_to_each_leaf_and_hides_no_nan(
    zeros: float, ones: float, error: float
):
    expected = trainings.Result({"w": np.ones(3), "zero": np.zeros(2)}, None, np.ones(1))
    result = trainings.Result({"w": np.full(3, ones), "zero": np.full(2, zeros)}, None, np.ones(1))
    np.testing.assert_equal(trainings.relative_error(result, expected), error)


### Processes

Results = Callable[[str, int], tuple[Outcome, list[dict[str, trainings.Result]]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Results:
    """`results(backend, size)`: the results of every rank of a job, which starts once for all
    selected runs."""

    @cache
    def job(backend: str, size: int) -> tuple[Outcome, list[dict[str, trainings.Result]]]:
        folder = tmp_path_factory.mktemp(f"{backend}-{size}")
        starts = {
            (run.model, run.rule): trainings.start(run.model, run.rule)
            for run in runs(backend, size)
        }
        (folder / "starts.pickle").write_bytes(pickle.dumps(starts))
        names = selected(request, backend, size, "run")
        outcome = launch(
            backend, size, "train_all.py", folder, *names, folder=folder, timeout_s=300
        )
        return outcome, [load(folder / f"result_{rank}.pickle") for rank in range(size)]

    return job


def load(path: Path) -> dict[str, trainings.Result]:
    return pickle.loads(path.read_bytes()) if path.exists() else {}


on_every_job = pytest.mark.parametrize("backend, size", [case(job) for job in JOBS])


@on_every_job
def test_a_training_ends_well_and_prints_nothing(backend: str, size: int, results: Results):
    outcome, _ = results(backend, size)
    assert outcome.succeeded
    assert outcome.outputs == ("",) * size


@pytest.mark.parametrize(
    "backend, size, run",
    [
        case(job, run, slow=run.model not in QUICK.get(job, ()))
        for job in JOBS
        for run in runs(*job)
    ],
    ids=str,
)
def test_processes_end_where_one_device_does(backend: str, size: int, run: Run, results: Results):
    _, ranks = results(backend, size)
    outcomes = [rank[str(run)] for rank in ranks]
    assert_equivalent(outcomes[0], run)
    for result in outcomes[1:]:
        assert jax.tree.map(np.ndarray.tobytes, result) == jax.tree.map(
            np.ndarray.tobytes, outcomes[0]
        )
