"""Sums over hosts first and then between hosts, of values whose sums are known by hand."""

import jax.numpy as jnp
import numpy as np
from on_ranks.claims import claim, error_of, schedules
from on_ranks.group import programs

import fddp
from fddp.comm import REPLICATED

# In float32 2²⁴ + 1 is 2²⁴, and 1 − 2²⁴ is exact: over hosts of two first the sum is 1. It is 0
# from left to right.
FOUR = np.array([2**24, 1, 1, -(2**24)], np.float32)


@claim()
def sums_over_hosts_first_are_exact(group: fddp.Group):
    local_count = group.size // group.processes
    numbers = np.arange(local_count * group.rank, local_count * (group.rank + 1)) + 1
    assert group.hierarchical() is group, "all are on this host"
    for local in (n for n in range(1, group.size + 1) if group.size % n == 0):
        levels = group.hierarchical(local)
        per_replica = levels.placement.per_replica
        for dtype, size in (
            (np.float32, 23),
            (jnp.bfloat16, 1),
        ):  # no multiple of a host's replicas, and less
            rank_values = (numbers[:, None] * np.arange(1, size + 1)).astype(dtype)
            total = (group.size * (group.size + 1) // 2 * np.arange(1, size + 1)).astype(dtype)
            x = levels.placement.place(rank_values.reshape(-1), per_replica)
            for placement, communicator in programs(levels):
                got = placement.program(communicator.all_reduce, (per_replica,), REPLICATED)(x)
                assert got.dtype == dtype
                for copy in got.addressable_shards:
                    np.testing.assert_array_equal(
                        copy.data, total, err_msg=f"{local} of {group.size}"
                    )


@claim(backends=("gloo",), sizes=(4,))
def every_schedule_adds_over_hosts_first(group: fddp.Group):
    levels = group.hierarchical(local=2)
    local_rows = np.split(FOUR, group.processes)[group.rank]
    for schedule in schedules(group):
        f = fddp.value_and_grad(lambda w, x: jnp.mean(w * x), group=levels, schedule=schedule)
        loss, grad = f(np.zeros((), np.float32), local_rows)
        assert (float(loss), float(grad)) == (0, 1 / 4), schedule


@claim(quick=("mpi",))
def ranks_that_give_hosts_another_size_all_hear_of_it(group: fddp.Group):
    message = error_of(lambda: group.hierarchical(local=1 if group.rank else group.size))
    assert f"rank 0: local={group.size}" in message and "rank 1: local=1" in message
    # An argument that is wrong on one rank only, too.
    assert f"1 of {group.size} ranks failed" in error_of(
        lambda: group.hierarchical(local=1 if group.rank else 0)
    )


@claim(backends=("gloo",), sizes=(4,))
def a_rank_that_trains_with_the_other_group_is_an_error_on_every_rank(group: fddp.Group):
    levels = group.hierarchical(local=2)
    mixed = group if group.rank else levels
    f = fddp.value_and_grad(lambda w, x: jnp.mean(w * x), group=mixed)
    message = error_of(lambda: f(np.zeros(2, np.float32), np.ones((1, 2), np.float32)))
    assert "rank 0: replicas per host in sums: 2" in message
    assert "rank 1: replicas per host in sums: all" in message
