"""Islands of several replicas that do not wait for each other, in real processes: held against
NumPy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import launch
from workers.islands_of_two import CASES, MET, ORDER, RATE, draws, first_params

Params = dict[str, np.ndarray]


def gradient(params: Params, x: np.ndarray) -> Params:
    """The gradient of `problems.layer`, written out."""
    y = np.tanh(x @ params["w"])
    delta = 2 * (y - params["b"]) / y.size
    return {"b": -delta.sum(axis=0), "w": x.T @ (delta * (1 - y**2))}


def descended(params: Params, batches: Sequence[np.ndarray]) -> Params:
    """Plain descent, a step for each batch."""
    for x in batches:
        slope = gradient(params, x)
        params = {name: params[name] - RATE * slope[name] for name in slope}
    return params


def by_hand(mix: float, start: int, met: int | None) -> Params:
    """Two islands, each a replica with all of its rows: in NumPy."""
    rows = [draws(island, start + 2 * ORDER.count(island)) for island in (0, 1)]
    shared = descended(
        first_params(), [np.concatenate(both) for both in zip(rows[0][:start], rows[1][:start])]
    )
    speed = {name: np.zeros_like(x) for name, x in shared.items()}
    local = [shared, shared]
    starting_points = [shared, shared]
    steps_done = [start, start]
    for number, k in enumerate(ORDER):
        if number == met:
            local = [shared, shared]
            starting_points = [shared, shared]
        local[k] = descended(local[k], rows[k][steps_done[k] : steps_done[k] + 2])
        steps_done[k] += 2
        speed = {
            name: 0.9 * speed[name] + starting_points[k][name] - local[k][name] for name in shared
        }
        shared = {name: shared[name] - 0.7 * speed[name] for name in shared}
        local[k] = {name: (1 - mix) * shared[name] + mix * local[k][name] for name in shared}
        starting_points[k] = shared
    return shared


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "backend, size, devices, cases",
    [
        ("gloo", 2, 2, ("in shards", "start", "restored")),
        pytest.param("gloo", 4, 1, CASES, marks=pytest.mark.slow),
        pytest.param("mpi", 4, 1, CASES, marks=pytest.mark.slow),
    ],
    ids=["gloo-2 of 2 devices", "gloo-4", "mpi-4"],
)
def test_two_islands_of_two_with_a_quorum_of_one_do_as_by_hand(
    tmp_path: Path, backend: str, size: int, devices: int, cases: Sequence[str]
):
    (tmp_path / "shared").mkdir()
    env: Any = {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_ENABLE_X64": "1"}
    outcome = launch(
        backend, size, "islands_of_two.py", tmp_path / "shared", *cases, folder=tmp_path, **env
    )
    assert outcome.succeeded
    for output in outcome.outputs:
        reported = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
        assert reported.keys() == {*cases}
        for name, got in reported.items():
            local, _ = CASES[name]
            expected = by_hand(
                local.get("mix", 0.0), local.get("start", 0), MET if name == "restored" else None
            )
            for leaf, x in expected.items():
                np.testing.assert_allclose(
                    np.reshape(got[leaf], x.shape), x, rtol=0, atol=1e-10, err_msg=name
                )
