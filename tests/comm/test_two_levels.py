"""Sums over hosts first and then between hosts: those of plain sums, on all replicas alike, in
every schedule."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from on_ranks.claims import HELD, SCHEDULES
from on_ranks.two_levels import FOUR
from processes import HOLD, launch
from trees import close

import fddp
from fddp import hooks
from fddp.comm import REPLICATED
from fddp.comm.two_levels import by_label

RNG = np.random.default_rng(0)
LOCAL = [1, 2, 4]


### One process


@pytest.mark.steps
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.int32, np.complex64])
def test_whole_numbers_are_summed_exactly(group, local, dtype):
    levels = group(4).hierarchical(local)
    numbers = RNG.integers(-50, 50, (4, 11))
    per_replica = levels.placement.per_replica
    x = levels.placement.place(numbers.reshape(-1).astype(dtype), per_replica)
    total = levels.placement.program(levels.communicator.all_reduce, (per_replica,), REPLICATED)(x)
    assert total.dtype == dtype
    np.testing.assert_array_equal(total, numbers.sum(0).astype(dtype))


@pytest.mark.parametrize("local", LOCAL)
def test_all_replicas_get_the_same_bits(group, local):
    levels = group(4).hierarchical(local)
    per_replica = group(4).placement.per_replica
    rows = RNG.normal(size=(4, 5, 7)).astype(np.float32)
    totals = levels.placement.program(
        lambda x: levels.communicator.all_reduce(x[0])[None], (per_replica,), per_replica
    )(rows)
    assert totals.shape == rows.shape and len({np.asarray(copy).tobytes() for copy in totals}) == 1
    np.testing.assert_allclose(totals[0], rows.astype(np.float64).sum(0), rtol=1e-6, atol=1e-6)


def test_sixteen_bits_are_rounded_once_and_not_at_every_level(group):
    """1 + 2⁻⁸, the sum of the first host, is 1 in bfloat16; 1 + 2⁻⁷, the sum of both, is a number
    there."""
    levels = group(4).hierarchical(2)
    per_replica = group(4).placement.per_replica
    x = np.array([1, 2**-8, 2**-8, 0], jnp.bfloat16)
    total = levels.placement.program(levels.communicator.all_reduce, (per_replica,), REPLICATED)(x)
    assert float(total[0]) == 1 + 2**-7


def test_a_replica_sends_over_the_network_the_part_that_it_has_of_its_hosts_sum(group):
    levels = group(4).hierarchical(2)
    per_replica = group(4).placement.per_replica
    program = levels.placement.program(levels.communicator.all_reduce, (per_replica,), REPLICATED)
    compiled = program.lower(jax.ShapeDtypeStruct((4 * 1000,), jnp.float32)).compile().as_text()
    sums = re.findall(r"= (\w+\[[\d,]*\])\S* all-reduce\(.*?replica_groups=(\{\{.*?\}\})", compiled)
    assert sums == [("f32[500]", "{{0,2},{1,3}}")]
    groups = re.findall(r"all-(?:to-all|gather)\(.*?replica_groups=(\{\{.*?\}\})", compiled)
    assert groups == ["{{0,1},{2,3}}"] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_adds_over_hosts_first(group, schedule):
    def gradient(group: fddp.Group) -> float:
        f = fddp.value_and_grad(lambda w, x: jnp.mean(w * x), group=group, schedule=schedule)
        return float(f(np.zeros((), np.float32), FOUR)[1])

    assert gradient(group(4).hierarchical(2)) == 1 / 4
    assert gradient(group(4)) != 1 / 4, "this order is no order of hosts"


PARAMS = {"hidden": np.float32(RNG.normal(size=(5, 7))), "out": np.float32(RNG.normal(size=7))}
BATCH = np.float32(RNG.normal(size=(8, 5)))


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - 1) ** 2)


@pytest.mark.steps
@pytest.mark.parametrize(
    "schedule, options",
    [
        *((schedule, {}) for schedule in SCHEDULES),
        ("overlap", {"hook": hooks.powersgd(2, start_step=0)}),
        ("overlap", {"optimizer": fddp.local_steps(optax.sgd(0.1), every=2)}),
    ],
    ids=[*SCHEDULES, "powersgd", "local_steps"],
)
def test_a_training_is_that_of_plain_sums_to_rounding(group, schedule, options):
    def trained(group: fddp.Group) -> Any:
        options_of_all = {"optimizer": optax.sgd(0.1), "schedule": schedule, "bucket_cap_mb": 0}
        step = fddp.train_step(loss_fn, group=group, **(options_of_all | options))
        state, _ = step(step.init(PARAMS), BATCH)
        state, info = step(state, BATCH)
        return jax.device_get(state.params), float(info.loss), info.sent.tolist()

    (params, loss, nbytes), (plain, plain_loss, plain_sent) = map(
        trained, (group(4).hierarchical(2), group(4))
    )
    close(params, plain, rtol=2e-4, atol=2e-5)
    assert loss == pytest.approx(plain_loss, rel=1e-4) and nbytes == plain_sent


### Hosts


def test_replicas_of_one_host_are_found_wherever_they_lie():
    assert by_label(["a", "b", "b", "a"]) == ((0, 3), (1, 2))
    assert by_label([7]) == ((0,),)


def test_unequal_hosts_are_refused_with_their_sizes():
    message = (
        "the 4 replicas of this group lie on 2 hosts, on one 1 and on another 3, .* give local=, "
        "the replicas that count"
    )
    with pytest.raises(ValueError, match=message):
        by_label(["a", "a", "a", "b"])


def test_one_host_and_one_replica_per_host_leave_the_group_as_it_is(group):
    for local in (None, 1, 4):
        assert group(4).hierarchical(local) is group(4)


@pytest.mark.parametrize("local", [0, 3, -2, 8, 2.0, True, "2"])
def test_a_host_has_a_divisor_of_the_replicas(group, local):
    with pytest.raises(ValueError, match=rf"a divisor of the 4 of this group; got {local!r}"):
        group(4).hierarchical(local)


def test_replicas_of_several_devices_are_refused():
    replicas = fddp.mesh_group(
        jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("replica", "model"))
    )
    with pytest.raises(
        ValueError, match=r"needs replicas of one device each, .* is several, along 'model'"
    ):
        replicas.hierarchical(2)


### Processes

CLAIMS = (
    "each_device_of_a_process_is_a_replica",
    "sums_over_hosts_first_are_exact",
    "every_schedule_adds_over_hosts_first",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "backend, size, devices", [pytest.param("gloo", 4, 1, marks=pytest.mark.slow), ("gloo", 2, 2)]
)
def test_two_hosts_of_two_replicas_sum_over_hosts_first(
    backend: str, size: int, devices: int, tmp_path: Path
):
    outcome = launch(
        backend,
        size,
        HOLD,
        tmp_path,
        *CLAIMS,
        folder=tmp_path,
        JAX_NUM_CPU_DEVICES=str(devices),
    )
    assert outcome.succeeded
    for rank in range(size):
        lines = (tmp_path / f"{rank}.json").read_text().splitlines()
        assert [json.loads(line)[:2] for line in lines] == [[claim, HELD] for claim in CLAIMS]
