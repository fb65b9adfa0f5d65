"""Hosts learn of each other, and impossible groups and worlds are refused."""

import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from problems import square

import fddp
from fddp.runtime import all_devices

W = np.zeros((), np.float32)


### One process: collectives return their inputs


def test_replicas_are_the_devices_of_the_mesh(group):
    assert [(group(n).rank, group(n).processes, group(n).size) for n in (1, 4, 8)] == [
        (0, 1, 1),
        (0, 1, 4),
        (0, 1, 8),
    ]
    assert (group(2).backend, group(2).axis_name) == ("local", "replica")


def test_a_group_over_one_axis_of_a_mesh_has_the_replicas_of_that_axis():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
    for axis, size in (("model", 2), ("data", 4)):
        two = fddp.mesh_group(mesh, axis)
        assert (two.size, two.axis_name) == (size, axis)
        loss, grad = fddp.value_and_grad(square, group=two)(W, jnp.arange(8.0))
        assert (float(loss), float(grad)) == (17.5, -7.0)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_reducing_over_one_process_is_the_identity(group, op):
    x = np.array([[1.5, -2.0]], np.float16)
    got = group(4).all_reduce(x, op)
    assert got.dtype == x.dtype and got.tolist() == x.tolist()


def as_ranks(group: fddp.Group, processes: int) -> list[fddp.Group]:
    hosts = group.hosts._replace(ranks=tuple(range(processes)))
    return [replace(group, rank=rank, hosts=hosts) for rank in range(processes)]


@pytest.mark.parametrize("count", [0, 2, 3, 8])
def test_rows_are_divided_once_among_the_processes_also_if_they_are_uneven(group, count):
    batch = {"x": np.arange(count), "y": (jnp.arange(2 * count).reshape(count, 2),)}
    parts = [rank.rows(batch) for rank in as_ranks(group(1), 3)]
    lengths = [len(part["x"]) for part in parts]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
    assert sorted(np.concatenate([part["x"] for part in parts])) == list(range(count))
    for part in parts:
        np.testing.assert_array_equal(part["y"][0], np.asarray(batch["y"][0])[part["x"]])


def test_rows_of_one_process_are_all_rows(group):
    assert group(8).rows([np.arange(5)])[0].tolist() == [0, 1, 2, 3, 4]
    assert group(8).rows({}) == {}


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({"x": np.ones(4), "y": np.ones((6, 2))}, ValueError, r"4 in \['x'\], 6 in \['y'\]"),
        (np.float32(3), ValueError, "batch has no dims, and rows lie along the first"),
        ({"x": np.ones(4), "n": np.int32(4)}, ValueError, r"\['n'\] has no dims"),
        (
            {"x": [1, 2]},
            TypeError,
            r"\['x'\]\[0\] must be an array, such as .*, got int 1",
        ),
    ],
)
def test_a_batch_without_rows_is_refused_by_name(group, batch, error, words):
    with pytest.raises(error, match=words):
        group(2).rows(batch)


def test_gathering_stacks_along_a_new_dim_also_what_is_empty_or_a_number(group):
    assert group(2).all_gather(3).tolist() == [3]
    assert group(2).all_gather(np.zeros((0, 2), np.int8)).shape == (1, 0, 2)
    group(2).barrier()


def test_what_rank_0_prints_is_flushed_and_goes_where_it_is_sent(group):
    class Screen(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    flushed: list[str] = []
    group(2).print("loss", 0.5, file=Screen())
    replace(group(2), rank=1).print("loss", 0.5, file=Screen())
    assert flushed == ["loss 0.5\n"]


def test_a_broadcast_keeps_every_bit_dtype_and_structure(group):
    tree = {
        "bf16": np.array([np.nan, -0.0, 1 / 3], jnp.bfloat16),
        "f64": np.float64(1 / 3),
        "flags": np.array([True, False]),
        "empty": np.zeros((0, 3), np.int64),
        "none": None,
        "key": jax.random.key(7),
    }
    received = group(2).broadcast(tree)
    assert (
        jax.random.key_data(received["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()
    )
    for name in ("bf16", "f64", "flags", "empty"):
        got = np.asarray(received[name])
        expected = np.asarray(tree[name])
        assert (got.dtype, got.shape, got.tobytes()) == (
            expected.dtype,
            expected.shape,
            expected.tobytes(),
        )
    assert received["none"] is None and group(2).broadcast({}) == {}


def test_a_broadcast_of_many_chunks_is_put_together_again(group, monkeypatch):
    monkeypatch.setattr("fddp.comm.objects.CHUNK_BYTES", 5)
    tree = [np.arange(7, dtype=np.int16), np.arange(3, dtype=np.float64)]
    assert [x.tolist() for x in group(2).broadcast(tree)] == [x.tolist() for x in tree]


def test_a_subgroup_of_all_processes_is_the_same_group(group):
    assert group(4).subgroup([0]).size == 4


def refused(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message):
        call()


### Errors


def test_a_group_refuses_what_it_cannot_do(group):
    two: fddp.Group = group(2)
    refused(
        ValueError,
        "op must be 'sum', 'max' or 'min', got 'mean'",
        lambda: two.all_reduce(1.0, "mean"),
    )
    refused(ValueError, r"root must be a rank in 0..0, got 1", lambda: two.broadcast(W, root=1))
    refused(ValueError, r"root must be a rank in 0..0, got -1", lambda: two.broadcast(W, root=-1))
    refused(ValueError, r"different numbers in 0..0, got \[0, 0\]", lambda: two.subgroup([0, 0]))
    refused(ValueError, r"different numbers in 0..0, got \[1\]", lambda: two.subgroup([1]))
    refused(ValueError, r"rank 0 is not in \[\]", lambda: two.subgroup([]))
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    refused(ValueError, "the mesh has axes data, none is 'replica'", lambda: fddp.mesh_group(mesh))


def test_all_reduce_needs_one_place_to_sum_over_and_an_operation_it_knows(group):
    plan = fddp.make_plan(W)
    both: dict[str, Any] = {"axis_name": "replica", "group": group(2)}
    refused(ValueError, "give either axis_name or group", lambda: fddp.all_reduce(W, plan))
    refused(ValueError, "give either axis_name or group", lambda: fddp.all_reduce(W, plan, **both))
    refused(
        ValueError,
        "op must be 'sum' or 'mean', got 'max'",
        lambda: fddp.all_reduce(W, plan, group=group(2), op="max"),
    )


def test_mpi_drives_one_device_a_process():
    refused(
        RuntimeError, "one device per process, and this process has 8", lambda: fddp.mpi_group(None)
    )


### Start


def test_init_refuses_what_no_world_can_be():
    refused(
        ValueError,
        "backend must be 'nccl', 'gloo', 'mpi', 'local' or None, got 'tcp'",
        lambda: fddp.init("tcp"),
    )
    refused(
        ValueError, "timeout_s must be more than 0 seconds, got 0", lambda: fddp.init(timeout_s=0)
    )
    refused(ValueError, "got nan", lambda: fddp.init(timeout_s=math.nan))
    for name, value, message in (
        ("stall_s", "x", "more than 0 seconds, got 'x'"),
        ("stall_s", True, "more than 0 seconds, got True"),
        ("timeout_s", "60", "more than 0 seconds, got '60'"),
        ("rank", "0", "a whole number of 0 or more, got '0'"),
        ("rank", 0.0, "a whole number of 0 or more, got 0.0"),
        ("rank", True, "a whole number of 0 or more, got True"),
        ("size", "2", "a whole number of 1 or more, got '2'"),
        ("size", 0, "a whole number of 1 or more, got 0"),
    ):
        wrong: Any = {"rank": 0, "size": 1} if name in ("rank", "size") else {}
        call = partial(fddp.init, **wrong | {name: value})
        refused(ValueError, f"{name} must be {message}", call)


def test_gloo_is_refused_where_jax_uses_gpus(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    message = "'gloo' connects CPUs, and JAX uses 'gpu' here; set JAX_PLATFORMS=cpu, or use 'nccl'"
    refused(RuntimeError, message, lambda: all_devices("gloo"))
    assert all_devices("nccl") == jax.devices()


def test_a_process_joins_one_world():
    world = fddp.init()
    assert fddp.init() is world and fddp.init() == world
    refused(
        ValueError, "was called before with .* and now with .*'gloo'", lambda: fddp.init("gloo")
    )
    refused(ValueError, "a process joins only one world", lambda: fddp.init(rank=0, size=2))


STARTS = {
    "fddp.init('mpi')": "backend 'mpi' needs mpi4jax, not installed here: pip install mpi4jax",
    "fddp.init('nccl')": "backend 'nccl' needs GPUs, and JAX finds none here; use 'gloo' or 'mpi'.",
    "fddp.init(rank=1)": "rank and size belong together, got rank=1 and size=None.",
    "fddp.init(rank=2, size=2)": "rank 2 of 2, according to fddp.init's arguments",
    "fddp.init('gloo', rank=0, size=2)": "no address of rank 0 comes from fddp.init's arguments",
    "fddp.init('gloo', rank=0, size=2, coordinator='here')": (
        "the coordinator is 'here', according to fddp.init's arguments; it must be host:port"
    ),
}
# A process of its own, which never joins a world. It does not find mpi4jax until the end.
SCRIPT = """
import importlib.util, json, os
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "mpi4jax" else find(name, *args)
import fddp
said = {}
for call in CALLS:
    try:
        eval(call)
    except (ValueError, RuntimeError) as error:
        said[call] = str(error)
importlib.util.find_spec = find
os.environ |= {"FDDP_RANK": "1", "FDDP_SIZE": "2"}
try:
    fddp.init("mpi")
except RuntimeError as error:
    said["rank 1 of 2"] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def messages() -> dict[str, str]:
    script = SCRIPT.replace("CALLS", repr(list(STARTS)))
    env = {"JAX_PLATFORMS": "cpu", "PATH": os.environ["PATH"]}
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=env
    )
    return json.loads(process.stdout)


@pytest.mark.steps
@pytest.mark.parametrize("call", STARTS)
def test_a_world_that_cannot_be_started_is_refused(messages, call):
    assert STARTS[call] in messages[call]


@pytest.mark.steps
def test_ranks_of_which_mpi_knows_nothing_are_not_left_to_train_alone(messages):
    """Ranks started by another MPI's mpiexec, or by hand: each is a world of its own to mpi4py."""
    assert re.search(
        r"rank 1 of 2 according to .*, and rank 0 of 1 according to MPI: .* or use backend 'gloo'",
        messages["rank 1 of 2"],
    )


@pytest.mark.parametrize(
    "value", [(np.ones(2), np.ones(3)), {"a": 1}, None, "text", jax.random.key(0)], ids=type
)
def test_a_group_reduces_one_numeric_array(group, value):
    with pytest.raises(
        TypeError, match=r"(?s)take one numeric array or number, got \w+ .*jax\.tree\.map\(group"
    ):
        group(2).all_reduce(value)
