"""Every part of bench/gpu.py runs on CPUs too, with figures that are right on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import gpu
from bench.jobs import ending
from bench.on_gpu.machine import LARGE, RANKED, Machine, look, one_gpu, shared, variables
from bench.on_gpu.words import rows, unsound
from bench.workload import read

ROOT = Path(__file__).parents[1]
SHARDS = ("None", "'optimizer'", "'state'")
ONE = Machine("gpu", "NVIDIA H200", 1, int(126e9), "2.30.7", quick=False)
LAST_RESORT_S = 3000


def every_part(test):
    """Marks a test that rehearses all parts."""
    return pytest.mark.ranks(pytest.mark.slow(test))


def rehearse(folder, *halves):
    """The output and results of some parts of bench/gpu.py; each half is a run, next to the
    others."""
    # One device, and no launcher's word, whatever pytest was started with.
    env = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    command = [sys.executable, "bench/gpu.py", "--quick", "--parts"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    printed = ""
    results = {}
    files = [folder / f"{names[0]}.json" for names in halves]
    commands = [[*command, *names, "--out", str(file)] for names, file in zip(halves, files)]
    with ending(
        [subprocess.Popen(words, cwd=ROOT, env=env, **pipes) for words in commands]
    ) as jobs:
        for job, file in zip(jobs, files):
            printed = job.communicate(timeout=LAST_RESORT_S)[0]
            assert job.returncode == 0, printed
            results |= json.loads(file.read_text())
    assert set(results) == {"machine", *(name for names in halves for name in names)}
    return printed, results


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """All parts: those of one process in one run, and those of ranks in another."""
    halves = [
        [name for name, part in gpu.PARTS.items() if part.isolated is separate]
        for separate in (True, False)
    ]
    return rehearse(tmp_path_factory.mktemp("gpu"), *halves)


def figures(rehearsed, name):
    _, results = rehearsed
    assert "failed" not in results[name]
    numbers = results[name]["figures"]
    assert (
        numbers and [entry for entry in numbers.values() if {"failed", "wrong"} & set(entry)] == []
    )
    return numbers


### Each part


@every_part
def test_a_step_has_the_losses_and_parameters_of_plain_jax_for_each_model(rehearsed):
    by_model = figures(rehearsed, "same")
    assert {name.partition(":")[0] for name in by_model} == {
        "mlp",
        "resnet",
        "gpt",
        "bert",
        "scanned",
    }
    for entry in by_model.values():
        first, last = entry["first_and_last_loss"]
        assert last < first  # it has trained, and parameters have gone a way
        assert entry["fddp"]["loss"] <= 1e-6 and entry["fddp"]["way"] <= 1e-5
        # The measure sees the effect of rounding.
        assert (
            entry["plain_again"]["bits_equal"]
            and 0 < entry["plain_with_rows_reversed"]["way"] <= 1e-3
        )


@every_part
def test_ranks_have_the_losses_of_one_replica_and_send_the_planned_buckets(rehearsed):
    (entry,) = figures(rehearsed, "ranks").values()
    assert entry["ranks"] == 2 and entry["backend"] == "gloo"
    assert entry["losses"][-1] < entry["losses"][0] and entry["losses"] == pytest.approx(
        entry["alone"], rel=1e-5
    )
    program = entry["program"]
    assert program["buckets"] > 1
    assert program["starts"] == [f"bucket {k}" for k in range(program["buckets"])]
    # The same step, compiled for GPUs that are not here.
    ahead = figures(rehearsed, "ahead")[RANKED]
    assert ahead["starts"] == program["starts"] and ahead["asynchronous"] == ahead["collectives"]
    assert ahead["target"] == "h100:2"


@every_part
def test_the_times_of_a_step_by_hand_are_there(rehearsed):
    for entry in figures(rehearsed, "cost").values():
        assert entry["fddp / by hand"]["median"] > 0 and abs(entry["extra_memory_in_gradients"]) < 1


@every_part
def test_each_of_two_ranks_holds_half_of_what_is_shared(rehearsed):
    memory = figures(rehearsed, "memory")
    unsharded, moments, all_of_it = (memory[f"mlp:tiny:16, shard={shard}"] for shard in SHARDS)
    assert moments["state_MiB"] == pytest.approx(
        unsharded["state_MiB"] * 2 / 3, rel=0.05
    )  # two of three are AdamW's
    assert all_of_it["state_MiB"] == pytest.approx(unsharded["state_MiB"] / 2, rel=0.05)
    assert all_of_it["arguments_MiB"] < moments["arguments_MiB"] < unsharded["arguments_MiB"]
    ahead = [
        figures(rehearsed, "ahead")[f"mlp:tiny:16, shard={shard}"]["arguments_MiB"]
        for shard in SHARDS
    ]
    assert ahead == sorted(ahead, reverse=True) and len(set(ahead)) == 3


@every_part
def test_ranks_of_every_launcher_train_together(rehearsed):
    launches = figures(rehearsed, "launchers")
    assert {"fddp.launch", "python -m fddp run", "srun's variables, one GPU a task"} <= set(
        launches
    )
    assert any("torchrun" in name for name in launches) and any(
        "mpi" in name.lower() for name in launches
    )
    for launch in launches.values():
        assert [(rank["rank"], rank["mean"]) for rank in launch["ranks"]] == [(0, 0.5), (1, 0.5)]


@every_part
def test_a_rehearsal_says_that_it_is_none_of_a_gpu(rehearsed):
    printed, results = rehearsed
    assert printed.startswith("No GPU was found") and not results["machine"]["gpus"]


### Failing parts


@pytest.mark.ranks
def test_a_part_that_is_late_is_ended_and_keeps_what_it_has_said(tmp_path):
    machine = Machine("cpu", "cpu", 0, 0, "", quick=True)
    path = tmp_path / "same.jsonl"
    path.write_text('{"earlier": {"wrong": "it differs"}}\n')
    outcome = gpu.run("same", machine, variables(os.environ, str(tmp_path)), path, seconds=0.1)
    assert "had not ended after" in outcome["failed"] and "earlier" in outcome["figures"]
    shown = rows("same", outcome, lambda figures: "as it should be")
    assert [row[2] for row in shown] == ["WRONG", "FAILED"] and "it differs" in shown[0][3]
    assert unsound({"same": outcome}) == [("same", "earlier"), ("same", "ended early")]


def test_an_error_of_one_model_hides_none_of_the_others(tmp_path, monkeypatch):
    def out_of_memory():
        raise RuntimeError("RESOURCE_EXHAUSTED: \n 80 GiB")

    def measures(machine):
        return {"first": out_of_memory, "second": lambda: {"ms": 1.0}}

    part = gpu.Part(measures, lambda figures: f"{figures['ms']} ms", True, 1)
    monkeypatch.setitem(gpu.PARTS, "same", part)
    gpu.answer("same", ONE, tmp_path / "said.jsonl")
    lines = (tmp_path / "said.jsonl").read_text().splitlines()
    outcomes = {
        "figures": {name: figures for line in lines for name, figures in json.loads(line).items()}
    }
    assert rows("same", outcomes, part.tell) == [
        ("same", "first", "FAILED", "RuntimeError: RESOURCE_EXHAUSTED: 80 GiB"),
        ("same", "second", "ok", "1.0 ms"),
    ]


### Variables


def test_ranks_share_one_gpu_and_have_one_each_of_several():
    assert ONE.ranks == 2 and ONE.chip == "h200" and ONE.models == LARGE
    variables_of_rank = shared(ONE, {"CUDA_VISIBLE_DEVICES": "GPU-1f"})
    assert (
        variables_of_rank["CUDA_VISIBLE_DEVICES"] == "GPU-1f"
        and variables_of_rank["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    )
    assert float(variables_of_rank["XLA_CLIENT_MEM_FRACTION"]) == 0.4
    several = ONE._replace(gpus=4)
    assert several.ranks == 4 and "CUDA_VISIBLE_DEVICES" not in shared(several, {})
    assert one_gpu({"CUDA_VISIBLE_DEVICES": "2,3"}) == {"CUDA_VISIBLE_DEVICES": "2"}
    assert ONE._replace(kind="NVIDIA L4", memory_bytes=int(20e9)).chip is None


def test_a_part_finds_the_checkout_first_and_then_what_was_there():
    env = variables({"PYTHONPATH": "/site", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "/cache")
    assert env["PYTHONPATH"] == f"{ROOT}{os.pathsep}/site"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env  # JAX refuses both names at once


def test_the_layers_of_a_workload_can_be_fewer():
    params = read("gpt:tiny@1:2").params
    assert "layer_0" in params and "layer_1" not in params
    assert look(quick=False).platform == "cpu"
