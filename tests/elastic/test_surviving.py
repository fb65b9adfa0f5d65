"""Ranks that end, stop or join: the others train on, to the bits of a run that nothing disturbed.

The truth is a run of one process, by `fddp.train_step` alone.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from processes import WORKERS, launch
from runtime.test_supervisor import run
from workers.elastic import PARAMS, digest, loss, rows_of

import fddp
from fddp.elastic.membership import Membership
from fddp.elastic.signs import Limits
from fddp.runtime import FINISHED, FOLDER, place_of

STEPS = 40
VIRTUAL: Any = {"virtual_replicas": 12}


@cache
def calm() -> fddp.TrainState:
    """The state of one replica that does all steps."""
    group = fddp.mesh_group(Mesh(np.array(jax.devices()[:1]), "replica"))
    step = fddp.train_step(loss, optax.adam(0.05), group=group, **VIRTUAL)
    state = step.init(PARAMS)
    for number in range(STEPS):
        state, _ = step(state, rows_of(number, group, VIRTUAL))
    return state


def results(
    folder: Path, ranks: int, options: Mapping[str, Any], faults: Mapping[str, Sequence[Any]]
) -> tuple[list[dict[str, Any]], str]:
    """What the ranks print at their end, and all that the job prints."""
    words = ["--elastic", "-n", str(ranks), str(WORKERS / "elastic.py"), str(folder), str(STEPS)]
    done = run(*words, json.dumps(options), json.dumps(faults), timeout_s=120)
    assert done.returncode == 0
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")], done.stderr


@pytest.mark.ranks
def test_ranks_die_one_of_them_rank_0_and_the_bits_are_those_of_a_calm_run(tmp_path: Path):
    ends, said = results(tmp_path, 3, VIRTUAL, {"1": ["kill", 5], "0": ["kill", 30]})
    assert {end["digest"] for end in ends} == {digest(calm())}
    assert min(min(end["sizes"]) for end in ends) < 3
    for end in ends:
        assert end["preempted"], "SIGTERM stops a loop after ranks have changed"
        assert "cannot train with fddp.local_steps" in end["refusals"][0]
        assert "cannot train with shard=" in end["refusals"][1]
    assert "rank 1 ended by SIGKILL: it starts again" in said
    assert "rank 0 ended by SIGKILL: it starts again" in said


@pytest.mark.ranks
def test_two_ranks_die_at_once_and_one_while_the_others_regroup(tmp_path: Path):
    faults = {"1": ["kill", 5], "2": ["kill", 5], "3": ["kill between", 0]}
    ends, _ = results(tmp_path, 4, VIRTUAL, faults)
    assert {end["digest"] for end in ends} == {digest(calm())}


@pytest.mark.ranks
def test_a_rank_that_was_stopped_for_a_while_is_excluded(tmp_path: Path):
    words = [tmp_path, STEPS, json.dumps(VIRTUAL), json.dumps({"2": ["stop", 5]})]
    outcome = launch("gloo", 3, WORKERS / "elastic.py", *words, folder=tmp_path)
    assert outcome.codes == (0, 0, 1)
    assert "have gone on without this one, which was silent or stuck" in outcome.outputs[2]
    assert all(digest(calm()) in output for output in outcome.outputs[:2])


@pytest.mark.ranks
def test_a_rank_that_starts_after_the_end_of_the_job_succeeds(tmp_path: Path):
    (tmp_path / FINISHED).touch()
    variables = {"FDDP_RANK": "1", "FDDP_SIZE": "2", "FDDP_COORDINATOR": "127.0.0.1:1"}
    script = [sys.executable, "-c", "import fddp; fddp.init(elastic=True); print('trains')"]
    env = os.environ | variables | {FOLDER: str(tmp_path), "JAX_PLATFORMS": "cpu"}
    outcome = subprocess.run(script, env=env, capture_output=True, text=True, timeout=300)
    assert (outcome.returncode, outcome.stdout) == (0, "")
    assert outcome.stderr == "fddp: the job has reached its end.\n"


@pytest.mark.ranks
def test_a_stuck_rank_is_ended_and_one_that_exits_early_is_not_waited_for(tmp_path: Path):
    ends, said = results(tmp_path, 3, VIRTUAL, {"0": ["exit", 5], "2": ["hold", 10]})
    assert {end["digest"] for end in ends} == {digest(calm())}
    assert "rank 0 ended with exit code 3" in said
    assert "rank 2 is silent or stuck: it is ended" in said


@pytest.mark.ranks
def test_a_rank_that_joins_breaks_off_no_collective_between_two_steps(tmp_path: Path):
    """The ranks meet at a barrier at their end, when another one has asked to join."""
    faults = {"0": ["linger", -1], "1": ["linger", -1], "2": ["kill", 38]}
    ends, said = results(tmp_path, 3, {}, faults)
    assert len({end["digest"] for end in ends}) == 1
    assert "exit code" not in said


@pytest.mark.ranks
def test_a_rank_dies_while_it_saves_and_another_job_goes_on_from_the_checkpoint(tmp_path: Path):
    _, said = results(tmp_path, 3, VIRTUAL, {"0": ["kill while writing", 20]})
    assert "rank 0 ended by SIGKILL" in said
    ends, _ = results(tmp_path, 2, VIRTUAL, {})
    assert all(end["sizes"] == [] and end["digest"] == digest(calm()) for end in ends)


def test_a_stranger_that_sends_single_bytes_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fddp.comm.handshake.PROOF_S", 0.4)
    member = Membership(0, ("127.0.0.1", 0), Limits(1, 5.0, 30.0), lambda: None).me
    with socket.create_connection(place_of(member.address)) as stranger:
        since = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < since + 5:
                stranger.sendall(b"x")
                time.sleep(0.1)


@pytest.mark.ranks
def test_a_world_that_has_ended_leaves_no_threads():
    script = (
        "import jax, numpy as np\n"
        "from pathlib import Path\n"
        "from fddp.comm import REPLICATED, world_group\n"
        "from fddp.elastic.jax_world import forget_devices\n"
        "for _ in range(4):\n"
        "    group = world_group(jax.devices())\n"
        "    placement = group.placement\n"
        "    x = placement.place(np.ones(1, np.float32), REPLICATED)\n"
        "    add = placement.program(group.communicator.all_reduce, (REPLICATED,), REPLICATED)\n"
        "    jax.block_until_ready(add(x))\n"
        "    del group, placement, add, x\n"
        "    forget_devices()\n"
        "    print(len(list(Path('/proc/self/task').iterdir())))"
    )
    words = [sys.executable, "-c", script]
    outcome = subprocess.run(words, capture_output=True, text=True, timeout=120)
    _, second, *_, last = outcome.stdout.split()
    assert second == last, outcome.stdout


def test_a_job_with_gpus_cannot_be_elastic(monkeypatch: pytest.MonkeyPatch):
    """NCCL's communicators form by JAX's coordination service, which elastic ranks leave."""
    with pytest.raises(ValueError, match="NCCL connects through JAX's coordination service"):
        fddp.init("nccl", elastic=True)
    monkeypatch.setattr("fddp.runtime.world._has_gpus", lambda: True)
    monkeypatch.setattr("fddp.runtime.world._started", [])
    with pytest.raises(ValueError, match="NCCL connects through JAX's coordination service"):
        fddp.init(elastic=True)


def test_an_mpi_job_cannot_be_elastic():
    with pytest.raises(ValueError, match="an MPI job ends with its first dead rank"):
        fddp.init("mpi", elastic=True)


def test_a_trainer_needs_an_elastic_job():
    with pytest.raises(ValueError, match=r"start the job by fddp.init\(elastic=True\)"):
        fddp.elastic.Trainer(lambda group: fddp.train_step(loss, optax.sgd(0.1)), PARAMS)
