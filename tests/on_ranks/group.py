"""Collectives and barriers of a group outside of steps, on values that can be computed by hand."""

import io
import os
import re
import time
from collections import OrderedDict
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from on_ranks.checkpoints import shared_folder
from on_ranks.claims import claim, error_of

import fddp
from fddp.comm import REPLICATED, Placement, mpi_transport


@claim()
def the_group_knows_its_place(group: fddp.Group):
    assert 0 <= group.rank < group.processes == group.size
    assert group.all_gather(group.rank).tolist() == list(range(group.size))
    assert fddp.init() is group


@claim()
def ranks_of_mpiexec_take_mpi_and_those_of_fddps_variables_gloo(group: fddp.Group):
    from_xla = "gloo" if jax.default_backend() == "cpu" else "nccl"
    assert group.backend == (from_xla if "FDDP_RANK" in os.environ else "mpi")


@claim()
def each_device_of_a_process_is_a_replica(group: fddp.Group):
    assert group.size == group.processes * jax.local_device_count()


@claim(backends=("mpi",))
def the_world_of_mpi_cannot_be_left_and_every_rank_says_why(group: fddp.Group):
    assert "backend 'mpi' ends with the process" in error_of(fddp.shutdown, RuntimeError)
    assert fddp.init() is group


@claim()
def rank_0_alone_is_main_and_prints(group: fddp.Group):
    with redirect_stdout(io.StringIO()) as shown:
        group.print("size", group.all_reduce(1), sep=" = ")
    assert group.all_gather(group.is_main).tolist() == [True] + [False] * (group.size - 1)
    assert shown.getvalue() == (f"size = {group.size}\n" if group.rank == 0 else "")


### Arrays


@claim()
def all_gather_stacks_in_order_of_rank(group: fddp.Group):
    row = np.array([[group.rank, 10.0 * group.rank]], np.float64)
    rows = group.all_gather(row)
    assert rows.dtype == np.float64
    assert rows.tolist() == [[[r, 10.0 * r]] for r in range(group.size)]


@claim()
def all_gather_keeps_every_dtype(group: fddp.Group):
    for dtype in (bool, np.int8, np.uint64, np.float16, jnp.bfloat16, np.float64, np.complex128):
        local = np.full(3, group.rank, dtype)
        rows = group.all_gather(local)
        assert rows.dtype == local.dtype
        assert all(rows[r].tobytes() == np.full(3, r, dtype).tobytes() for r in range(group.size))


@claim()
def all_gather_of_nothing_is_nothing(group: fddp.Group):
    assert group.all_gather(np.zeros((0, 3), np.float32)).shape == (group.size, 0, 3)


@claim()
def all_reduce_sums_and_finds_extremes(group: fddp.Group):
    local = np.array([group.rank, -group.rank], np.int64)
    last = group.size - 1
    assert group.all_reduce(local).tolist() == [last * group.size // 2, -last * group.size // 2]
    assert group.all_reduce(local, "max").tolist() == [last, 0]
    assert group.all_reduce(local, "min").tolist() == [0, -last]
    assert group.all_reduce(0.5).tolist() == group.size / 2


@claim()
def another_operation_is_an_error(group: fddp.Group):
    assert "'mean'" in error_of(lambda: group.all_reduce(1.0, "mean"))


@claim(backends=("mpi",))
def a_small_sum_is_not_slept_through(group: fddp.Group):
    naps = list[float]()
    counts = list[int]()
    local = group.placement.place(jnp.full(4096, group.rank + 1.0), REPLICATED)
    *_, (placement, communicator) = programs(group)
    add = placement.program(communicator.all_reduce, (REPLICATED,), REPLICATED)
    with mock.patch.object(
        mpi_transport, "time", SimpleNamespace(sleep=lambda s: (naps.append(s), time.sleep(s)))
    ):
        for _ in range(50):
            naps.clear()
            assert np.unique(add(local)).tolist() == [sum(range(1, group.size + 1))]
            counts.append(len(naps))
    # With a nap after each step of each message there are three times as many at best.
    assert min(counts) <= mpi_transport.MESSAGES


def programs(group: fddp.Group) -> list[tuple[Placement, fddp.Communicator]]:
    """Those of a loss, and those of a step's messages, in two lanes."""
    in_lanes = group.transport.in_lanes
    assert (in_lanes is None) == (jax.local_device_count() > 1 or jax.default_backend() != "cpu")
    of_step = [in_lanes(2, group.journal)] if in_lanes else []
    return [(group.placement, group.communicator), *of_step]


@claim()
def parts_of_a_sum_gathered_are_the_sum(group: fddp.Group):
    replicas = group.size
    per_replica = group.placement.per_replica

    def inside(comm: fddp.Communicator, x: jax.Array) -> tuple[jax.Array, ...]:
        part = comm.reduce_scatter(x.reshape(replicas, -1))
        number = comm.replica_index()[None]
        return comm.all_gather(part).reshape(-1), comm.all_reduce(x), part.reshape(-1), number

    for dtype in (np.float32, np.float16, jnp.bfloat16):
        # Whole numbers with exact sums.
        local = np.arange(5 * replicas, dtype=np.float32).astype(dtype) * (group.rank + 1)
        total = np.arange(5 * replicas, dtype=np.float32) * (replicas * (replicas + 1) // 2)
        x = group.placement.place(local, per_replica)
        for placement, comm in programs(group):
            *sums, part, number = placement.program(
                partial(inside, comm), (per_replica,), (REPLICATED, REPLICATED, *[per_replica] * 2)
            )(x)
            np.testing.assert_array_equal(
                _first_shard(part), total.astype(dtype)[5 * group.rank :][:5]
            )
            for received in sums:
                np.testing.assert_array_equal(_first_shard(received), total.astype(dtype))
            assert int(_first_shard(number)[0]) == group.rank


def _first_shard(x: jax.Array) -> np.ndarray:
    return np.asarray(x.addressable_shards[0].data)


@claim()
def broadcast_gives_the_roots_bits(group: fddp.Group):
    nan = np.array([0x7FC12345, 0x80000000], np.uint32).view(
        np.float32
    )  # a NaN with a payload, and -0.0
    for root in (0, group.size - 1):
        root_tree = {
            "bf16": jnp.full((2, 1), 1.5, jnp.bfloat16),
            "empty": np.zeros((0, 4), np.float32),
            "float64": np.array([1 / 3], np.float64),
            "key": jax.random.key(7),
            "nan": nan,
            "number": 3,
            "uint8": np.arange(5, dtype=np.uint8),
        }
        local = root_tree if group.rank == root else jax.tree.map(_changed, root_tree)
        got = group.broadcast(local, root)
        assert jax.tree.structure(got) == jax.tree.structure(root_tree)
        assert jnp.array_equal(
            jax.random.key_data(got.pop("key")), jax.random.key_data(root_tree.pop("key"))
        )
        for name, value in root_tree.items():
            assert np.asarray(got[name]).dtype == np.asarray(value).dtype, name
            assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name


def _changed(x):
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key(8)
    return np.zeros_like(np.asarray(x))


@claim()
def broadcast_of_nothing_is_nothing(group: fddp.Group):
    assert group.broadcast({"none": None, "empty": ()}) == {"none": None, "empty": ()}


@claim()
def a_broadcast_of_trees_in_another_order_is_an_error_on_all(group: fddp.Group):
    names = sorted(["first", "second"], reverse=group.rank == 1)
    message = error_of(lambda: group.broadcast(OrderedDict.fromkeys(names, 1.0)))
    assert "ranks differ in their trees" in message and "the order leaf second" in message


@claim()
def broadcast_from_a_rank_that_is_not_there_is_an_error(group: fddp.Group):
    assert str(group.size) in error_of(lambda: group.broadcast(1.0, root=group.size))


### Barriers and subgroups


@claim()
def no_rank_passes_a_barrier_before_the_last_one_reaches_it(group: fddp.Group):
    with shared_folder(group) as folder:
        for last in range(2):
            if group.rank == last:
                time.sleep(0.3)
            (folder / f"{last} {group.rank}").touch()
            group.barrier()
            assert len(list(folder.glob(f"{last} *"))) == group.processes


@claim()
def a_subgroup_numbers_its_ranks_anew(group: fddp.Group):
    backwards = group.subgroup(range(group.size)[::-1])
    assert (backwards.rank, backwards.size) == (group.size - 1 - group.rank, group.size)
    assert backwards.all_gather(group.rank).tolist() == list(range(group.size))[::-1]
    assert backwards.broadcast(np.int32(group.rank)) == group.size - 1


@claim()
def a_subgroup_of_one_is_alone(group: fddp.Group):
    single = group.subgroup([group.rank])
    assert (single.rank, single.size, single.processes) == (0, 1, 1)
    assert single.all_gather(group.rank).tolist() == [group.rank]


@claim(sizes=(3, 4))
def two_subgroups_do_not_hear_each_other(group: fddp.Group):
    """Two pairs, or a pair and a single rank."""
    ranks = [r for r in range(group.size) if r // 2 == group.rank // 2]
    subgroup = group.subgroup(ranks)
    assert (subgroup.rank, subgroup.size) == (group.rank % 2, len(ranks))
    assert subgroup.all_reduce(group.rank) == sum(ranks)
    assert subgroup.broadcast(np.int64(group.rank), root=len(ranks) - 1) == ranks[-1]
    subgroup.barrier()


@claim()
def a_subgroup_has_the_groups_backend(group: fddp.Group):
    assert group.subgroup(range(group.size)).backend == group.backend


@claim()
def a_subgroup_without_this_rank_is_an_error(group: fddp.Group):
    absent = [r for r in range(group.size) if r != group.rank]
    assert f"rank {group.rank} is not in" in error_of(lambda: group.subgroup(absent))
    assert "different" in error_of(lambda: group.subgroup([group.rank, group.rank]))
    assert "different" in error_of(lambda: group.subgroup([group.rank, group.size]))


### Open ports


# 127.0.0.1, the same for IPv6, and ::1, as Linux writes them
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@claim()
def on_one_host_nothing_listens_where_other_hosts_reach_it(group: fddp.Group):
    group.barrier()
    assert listening() <= LOOPBACK, listening()


@claim(backends=("mpi",))
def a_job_that_is_killed_leaves_no_shared_memory_behind(group: fddp.Group):
    group.barrier()
    mapped = set(re.findall(r"/dev/shm/mpich_shm.*", Path("/proc/self/maps").read_text()))
    assert all(path.endswith("(deleted)") for path in mapped), mapped


def listening() -> set[str]:
    """The addresses at which this process listens, without those of its launcher."""
    addresses = dict[str, str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                addresses[f"socket:[{fields[9]}]"] = fields[1].rpartition(":")[0]
    sockets, inherited = (open_files(process) for process in ("self", os.getppid()))
    return {address for name, address in addresses.items() if name in sockets - inherited}


def open_files(process: object) -> set[str]:
    files = set[str]()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            files.add(str(file.readlink()))
        except OSError:  # it was the folder's own
            continue
    return files
