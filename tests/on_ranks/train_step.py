"""A step of ranks that hold different values takes the mean over all of them; on problems small
enough for paper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks
from problems import RATE, product, rows, square, towards_the_mean

import fddp

### Means


def numbers_of_ranks(group: fddp.Group) -> np.ndarray:
    """A number for each rank; their mean and the mean of their squares are whole numbers."""
    return 6 * np.arange(group.size)


@claim()
def a_step_takes_the_mean_over_ranks(group: fddp.Group):
    numbers = numbers_of_ranks(group)
    for schedule in ("overlap", "after"):
        step = towards_the_mean(group, schedule=schedule)
        state, info = step(step.init(jnp.zeros(())), rows(*2 * [numbers[group.rank]]))
        assert float(state.params) == numbers.mean(), schedule
        assert float(info.loss) == (numbers**2).mean(), schedule


@claim()
def value_and_grad_takes_the_mean_over_ranks(group: fddp.Group):
    f = fddp.value_and_grad(square, group=group)
    numbers = numbers_of_ranks(group)
    loss, grad = f(jnp.zeros(()), rows(numbers[group.rank]))
    assert (float(loss), float(grad)) == ((numbers**2).mean(), -2 * numbers.mean())


@claim()
def inside_a_context_of_64_bits_a_step_trains_in_64_bits(group: fddp.Group):
    third = 1 / 3 + np.arange(group.size)  # exact in no float32
    with jax.enable_x64(True):
        step = towards_the_mean(group)
        state, info = step(step.init(np.zeros(())), third[group.rank :][:1])
    assert (state.params.dtype, info.loss.dtype) == (np.float64, np.float64)
    np.testing.assert_allclose(state.params, third.mean(), rtol=1e-15)


@claim()
def metrics_are_averaged_over_ranks(group: fddp.Group):
    step = fddp.train_step(
        lambda w, x: (square(w, x), {"row": x[0]}), optax.sgd(RATE), group=group, has_aux=True
    )
    _, info = step(step.init(jnp.zeros(())), rows(group.rank))
    assert float(info.aux["row"]) == np.arange(group.size).mean()


@claim()
def no_sync_waits_for_the_next_step(group: fddp.Group):
    step = towards_the_mean(group)
    state, info = step.no_sync(step.init(jnp.zeros(())), rows(group.rank))
    assert float(info.loss) == group.rank**2, "of this rank's rows alone"
    assert float(state.params) == 0
    state, _ = step(state, rows(group.rank + 1))
    assert float(state.params) == np.arange(group.size).mean() + 0.5


@claim()
def an_optimizer_gets_the_mean_loss_of_all_ranks(group: fddp.Group):
    extra_args: Any = optax.GradientTransformationExtraArgs
    recording = extra_args(
        lambda params: jnp.zeros(()),
        lambda updates, state, params=None, *, value, **_: (updates, value),
    )
    step = fddp.train_step(product, recording, group=group)
    state, _ = step(step.init(np.float32(2)), rows(1 + group.rank))
    np.testing.assert_allclose(state.opt_state, 1 + group.size, rtol=1e-6)
    assert same_on_all_ranks(group, state)


### Parameters


@claim()
def parameters_without_a_gradient_stay(group: fddp.Group):
    step = fddp.train_step(lambda p, x: square(p["w"], x), optax.sgd(RATE), group=group)
    state, _ = step(step.init({"count": jnp.int32(3), "w": jnp.zeros(())}), rows(group.rank))
    assert int(state.params["count"]) == 3
    assert float(state.params["w"]) == np.arange(group.size).mean()


@claim()
def a_used_up_state_is_an_error(group: fddp.Group):
    step = towards_the_mean(group)
    state = step.init(jnp.zeros(()))
    later, _ = step(state, rows(group.rank))
    assert "donate=False" in error_of(lambda step=step, state=state: step(state, rows(1.0)))
    step(later, rows(1.0))


### Groups


@claim(sizes=(3, 4))
def two_subgroups_train_apart(group: fddp.Group):
    """Two pairs, or a pair and a single rank; each starts from its own first rank."""
    ranks = [r for r in range(group.size) if r // 2 == group.rank // 2]
    subgroup = group.subgroup(ranks)
    step = towards_the_mean(subgroup)
    state, info = step(step.init(jnp.float32(group.rank)), rows(group.rank))
    assert float(state.params) == np.mean(ranks)
    assert float(info.loss) == np.mean(np.square(np.subtract(ranks, ranks[0])))


@claim()
def two_jobs_of_one_group_do_not_meet(group: fddp.Group):
    first_job = towards_the_mean(group)
    two = towards_the_mean(group.subgroup(range(group.size)))
    a = first_job.init(jnp.zeros(()))
    b = two.init(jnp.ones(()))
    for _ in range(2):
        a, _ = first_job(a, rows(group.rank))
        b, _ = two(b, rows(group.rank + 1))
    assert float(b.params) == float(a.params) + 1


### Programs


@claim()
def a_step_makes_no_transfer_that_nobody_asked_for(group: fddp.Group):
    for options in ({}, {"hook": fddp.hooks.bf16()}):
        step = towards_the_mean(group, **options)
        state = step.init(np.zeros(()))
        local_rows = jax.device_put(rows(group.rank))
        state, _ = step(state, local_rows)
        with jax.transfer_guard("disallow"):
            state, _ = step(state, local_rows)
        assert float(state.params) == np.arange(group.size).mean()


@claim(quick=("mpi",))
def without_jit_a_step_trains_too(group: fddp.Group):
    with jax.disable_jit():
        step = towards_the_mean(group)
        state, _ = step(step.init(np.zeros(())), rows(group.rank))
    assert float(state.params) == np.arange(group.size).mean()


@claim()
def an_array_put_at_a_second_place_of_a_state_is_copied(group: fddp.Group):
    def loss(p: jax.Array, x: Any, *, model_state: jax.Array) -> Any:
        return jnp.mean((p - x) ** 2) + jnp.sum(model_state), (model_state, {})

    step = fddp.train_step(loss, optax.sgd(RATE), group=group, has_aux=True)
    state = step.init(jnp.zeros(()), model_state=jnp.ones(()))
    state, _ = step(state, rows(group.rank))  # the parameter is the mean of the ranks now
    state, _ = step(state._replace(model_state=state.params), rows(group.rank))
    state, info = step(state._replace(model_state=state.params), rows(group.rank))
    ranks = np.arange(group.size)
    assert float(state.model_state) == float(state.params) == ranks.mean()
    np.testing.assert_allclose(float(info.loss), ranks.var() + ranks.mean(), rtol=1e-6)
