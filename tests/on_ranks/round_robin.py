"""Several groups of the same ranks train as one group does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks

import fddp

SIZES = (10_000, 1, 1_000, 10, 100)
STEPS = 12


def trained(group: fddp.Group) -> list[np.ndarray]:
    """Leaves of different sizes, each a bucket, and a table of which rows travel, after some steps
    on random rows."""
    rng = np.random.default_rng(0)
    params = [rng.normal(size=n).astype(np.float32) for n in (*SIZES, (20_000, 2))]

    def loss(params: list[Any], x: Any) -> jax.Array:
        *leaves, table = params
        words = jnp.abs(1000 * x[0, :8]).astype(jnp.int32)
        return jnp.mean(sum(x[0, : w.size] @ w**2 for w in leaves)) + jnp.mean(table[words] ** 2)

    step = fddp.train_step(loss, optax.sgd(1e-3), group=group, bucket_cap_mb=0)
    state = step.init(params)
    rows = np.random.default_rng(group.rank)
    for _ in range(STEPS):
        state, _ = step(state, rows.normal(size=(1, max(SIZES))).astype(np.float32))
    assert (
        sum(bucket.rows is None for bucket in step.plan.buckets)
        == len(SIZES)
        == len(step.plan.buckets) - 1
    )
    return jax.device_get(state.params)


def groups(group: fddp.Group, count: int) -> list[fddp.Group]:
    """The group and copies of it, as a user makes them."""
    return [group, *(group.subgroup(range(group.processes)) for _ in range(count - 1))]


@claim(quick=("gloo",))
def groups_in_turn_train_as_one_does(group: fddp.Group):
    expected = trained(group)
    for count in (3, 5):
        got = trained(fddp.round_robin(groups(group, count)))
        assert same_on_all_ranks(group, got), count
        for in_turn, plain in zip(got, expected):
            if group.backend == "mpi" or group.size == 2:
                np.testing.assert_array_equal(in_turn, plain, err_msg=f"{count} groups")
            # Gloo adds devices in another order, and rounds sums of more than two otherwise
            else:
                np.testing.assert_allclose(
                    in_turn, plain, rtol=1e-5, atol=1e-6, err_msg=f"{count} groups"
                )


@claim()
def groups_of_another_order_are_an_error_on_every_rank(group: fddp.Group):
    backwards = group.subgroup(range(group.size)[::-1])
    ranks = list(range(group.size))
    message = error_of(lambda: fddp.round_robin([group, backwards]))
    assert f"on processes {ranks}, group 1 is" in message
    assert f"on processes {ranks[::-1]}." in message
    assert "same replicas in the same order" in error_of(
        lambda: fddp.round_robin([group, group.subgroup([group.rank])])
    )


@claim()
def another_number_of_groups_on_another_rank_is_an_error_on_every_rank(group: fddp.Group):
    count = 3 if group.rank == 0 else 2
    message = error_of(lambda: fddp.round_robin([group] * count))
    assert "rank 0: 3 groups" in message and "rank 1: 2 groups" in message
