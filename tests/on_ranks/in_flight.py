"""Steps with `schedule="eager"`, whose last sums the next step's program receives."""

from contextlib import redirect_stderr
from io import StringIO
from typing import Any

import jax
import numpy as np
import pytest
from on_ranks.checkpoints import shared_folder
from on_ranks.claims import claim
from on_ranks.one_program import ADAM, batches, loss, mine, net
from trees import close, equal
from truth import by_plain_jax

import fddp


def eager_step(group: fddp.Group, **options: Any) -> fddp.TrainStep:
    return fddp.train_step(loss, ADAM, group=group, bucket_cap_mb=0, schedule="eager", **options)


def trained(step: fddp.TrainStep, group: fddp.Group, rows: np.ndarray) -> tuple[Any, list[float]]:
    state, losses = step.init(net()), list[float]()
    for batch in rows:
        state, info = step(state, mine(group, batch))
        losses.append(float(info.loss))
    return state, losses


@claim(backends=("mpi", "gloo"))
def steps_with_sums_in_flight_train_as_by_plain_jax(group: fddp.Group):
    rows = batches(group, 5)
    expected = by_plain_jax(loss, ADAM, net(), list(rows))
    for options in ({}, {"shard": "state"}, {"accumulation_steps": 2}):
        step = eager_step(group, **options)
        state, losses = trained(step, group, rows)
        assert isinstance(state, fddp.StateInFlight) and step.timeline().messages
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
        whole = fddp.whole(step.finish(state).params, group=group)
        close(whole, expected.params, rtol=1e-3, atol=1e-5)


@claim(backends=("mpi", "gloo"))
def parameters_whose_sums_are_in_flight_cannot_be_read(group: fddp.Group):
    step = eager_step(group)
    state, _ = trained(step, group, batches(group, 1))
    assert int(state.step) == 1
    with pytest.raises(AttributeError, match=r"state.params: sums .* in flight.*step.finish"):
        state.params  # noqa: B018


@claim(backends=("mpi", "gloo"))
def a_state_in_flight_is_finished_where_it_is_read_and_trains_on(group: fddp.Group):
    rows = batches(group, 4)
    expected, _ = trained(eager_step(group), group, rows)
    step = eager_step(group)
    state, _ = trained(step, group, rows[:2])
    with shared_folder(group) as path:
        with fddp.Checkpoints(path, step) as checkpoints:
            assert checkpoints.save(state, now=True)
        with fddp.Checkpoints(path, step) as checkpoints, redirect_stderr(StringIO()) as words:
            restored, _ = checkpoints.restore(step.init(net()))
    assert group.rank > 0 or "goes on from step 2" in words.getvalue()
    equal(restored.params, step.finish(state).params)
    error = fddp.evaluate(loss, state, [mine(group, rows[2])], group=group)
    np.testing.assert_allclose(
        error, loss(step.finish(state).params, rows[2][: 4 * group.size]), rtol=1e-5
    )
    for batch in rows[2:]:
        state, _ = step(state, mine(group, batch))
    close(step.finish(state).params, expected.finish().params, rtol=1e-5)


@claim(backends=("mpi", "gloo"))
def a_state_in_flight_is_taken_by_no_sync_and_by_a_step_of_another_schedule(group: fddp.Group):
    rows = batches(group, 4)
    joined = [rows[0], np.concatenate(rows[1:3]), rows[3]]
    expected = by_plain_jax(loss, ADAM, net(), joined).params
    step = eager_step(group)
    state, _ = trained(step, group, rows[:1])
    state, _ = step.no_sync(state, mine(group, rows[1]))
    state, _ = step(state, mine(group, rows[2]))
    state, _ = step.with_options(schedule="overlap")(state, mine(group, rows[3]))
    close(state.params, expected, rtol=1e-3, atol=1e-5)


@claim(backends=("mpi", "gloo"))
def a_scan_of_eager_steps_has_the_bits_of_a_loop_of_them(group: fddp.Group):
    rows = batches(group, 5)
    step = eager_step(group)
    expected, losses = trained(step, group, rows)
    state, _ = trained(step, group, rows[:2])
    local = np.stack([mine(group, batch) for batch in rows[2:]])
    if group.placement.on_mesh:  # a program over a mesh has the rows of all processes
        local = rows[2:]
    state, info = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(state, local)
    np.testing.assert_array_equal(info.loss, losses[2:])
    equal(step.finish(state), step.finish(expected))


@claim(backends=("mpi", "gloo"))
def sums_are_received_only_once(group: fddp.Group):
    group = group.subgroup(range(group.processes))  # an error ends the messages of a group
    rows = batches(group, 2)
    step = eager_step(group, donate=False)
    state, _ = trained(step, group, rows[:1])
    jax.block_until_ready(step.finish(step(state, mine(group, rows[1]))[0]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="received these sums already"):
        jax.block_until_ready(step(state, mine(group, rows[1]))[1])
