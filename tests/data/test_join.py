"""Ranks that have run out of data count for nothing.

PyTorch's test_ddp_uneven_inputs and test_ddp_grad_div_uneven_inputs. Here the replicas are devices
of one process and the batches those that `fddp.join` yields; that real ranks agree on when to end
is tested in `on_ranks/join.py`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import close

import fddp

REPLICAS = 4
ROWS = 6
RNG = np.random.default_rng(9)
W = RNG.normal(size=(3,))
BATCH = RNG.normal(size=(REPLICAS * ROWS, 3))


def loss(w: Any, x: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ w) - 1) ** 2)


def joined(active: list[int], divide_by_all: bool) -> fddp.Joined:
    """A joined batch of ranks, some without data."""
    share = np.repeat(np.isin(np.arange(REPLICAS), active).astype(np.float32), ROWS)
    return fddp.Joined(BATCH, share, np.ones_like(share) if divide_by_all else share)


def rows_of_ranks(active: list[int]) -> list[np.ndarray]:
    return [BATCH.reshape(REPLICAS, ROWS, 3)[k] for k in active]


@pytest.mark.steps
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("active", [[0, 1, 2, 3], [1, 3], [2], []], ids=str)
def test_gradients_are_those_of_active_ranks_over_all_ranks_or_over_the_active_ones(
    group, x64, steps, active
):
    f = fddp.value_and_grad(loss, group=group(REPLICAS), accumulation_steps=steps)
    values = [jax.value_and_grad(loss)(W, part) for part in rows_of_ranks(active)]
    for divide_by_all, divisor in ((True, REPLICAS), (False, max(len(active), 1))):
        got = f(W, joined(active, divide_by_all))
        for x, expected in zip(got, [sum(v[k] for v in values) / divisor for k in (0, 1)]):
            np.testing.assert_allclose(x, expected, rtol=1e-9, atol=1e-12)


def test_no_sync_goes_on_while_some_ranks_are_done(group, x64):
    step = fddp.train_step(loss, optax.sgd(1.0), group=group(REPLICAS))
    state, _ = step.no_sync(step.init(W), joined([0, 1, 2, 3], False))
    state, _ = step(state, joined([3], False))
    grads = [jax.grad(loss)(W, part) for part in rows_of_ranks([0, 1, 2, 3, 3])]
    np.testing.assert_allclose(state.params, W - sum(grads) / 5, rtol=1e-9)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        norm = fddp.BatchNorm(
            use_running_average=False, momentum=0.0, axis_name="replica", param_dtype=jnp.float64
        )
        return norm(nn.Dense(4, param_dtype=jnp.float64)(x))


@pytest.mark.steps
def test_cross_replica_batch_norm_goes_on_and_sees_every_ranks_rows(group, x64):
    """Rows of ranks that are done count as well: they are a batch like any other, but its loss does
    not count."""
    model = Normed()
    variables: Any = model.init(jax.random.key(0), BATCH)

    def normed(params: Any, x: Any, *, model_state: Any) -> Any:
        y, new = model.apply({"params": params, **model_state}, x, mutable=["batch_stats"])
        return jnp.mean(y[:, 0] ** 3 + y[:, 1]), (dict(new), None)

    start = {"batch_stats": variables["batch_stats"]}
    f = fddp.value_and_grad(normed, group=group(REPLICAS))
    active = [0, 2]
    (_, (new, _)), grads = f(variables["params"], joined(active, False), model_state=start)

    def by_hand(params: Any) -> Any:
        hidden = BATCH @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
        y = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
        y = y * params["BatchNorm_0"]["scale"] + params["BatchNorm_0"]["bias"]
        counted = y.reshape(REPLICAS, ROWS, 4)[np.array(active)]
        return jnp.mean(counted[..., 0] ** 3 + counted[..., 1])

    expected = jax.grad(by_hand)(variables["params"])
    close(grads, expected, rtol=1e-9)
    hidden = (
        BATCH @ variables["params"]["Dense_0"]["kernel"] + variables["params"]["Dense_0"]["bias"]
    )
    close(new["batch_stats"]["BatchNorm_0"]["mean"], hidden.mean(0))


@pytest.mark.parametrize("leader", [0, 2, 3])
def test_buffers_are_those_of_the_first_rank_that_still_has_data(group, leader):
    """DDP does the same: a rank that goes on with its last batch must not fill all statistics with
    it."""

    def counting(w: Any, x: Any, *, model_state: Any) -> Any:
        return jnp.mean((x - w) ** 2), (model_state + jnp.mean(x), None)

    step = fddp.train_step(counting, optax.sgd(0.1), group=group(REPLICAS))
    batch = joined([k for k in range(REPLICAS) if k >= leader], False)
    rows = np.repeat(np.arange(REPLICAS, dtype=np.float32), ROWS)
    leads = np.arange(len(rows)) == leader * ROWS
    state = step.init(jnp.zeros(()), model_state=jnp.float32(10))
    state, _ = step(state, batch._replace(rows=rows, leads=leads))
    assert float(state.model_state) == 10 + leader


@pytest.mark.steps
@pytest.mark.parametrize(
    ("active", "mean"), [([0, 1, 2, 3], 11.5), ([1, 3], 12), ([3], 13), ([], 10)], ids=str
)
def test_buffers_are_averaged_over_those_that_still_have_data(group, active, mean):
    """If no rank of a group has data, the buffers stay."""

    def counting(w: Any, x: Any, *, model_state: Any) -> Any:
        new = {"float": model_state["float"] + jnp.mean(x), "int": model_state["int"] + 1}
        return jnp.mean((x - w) ** 2), (new, None)

    options: Any = {"broadcast_buffers": "mean"}
    step = fddp.train_step(counting, optax.sgd(0.1), group=group(REPLICAS), **options)
    rows = np.repeat(np.arange(REPLICAS, dtype=np.float32), ROWS)
    leads = np.arange(len(rows)) == (active[0] * ROWS if active else -1)
    state = step.init(jnp.zeros(()), model_state={"float": jnp.float32(10), "int": jnp.int32(5)})
    state, _ = step(state, joined(active, False)._replace(rows=rows, leads=leads))
    assert float(state.model_state["float"]) == mean
    assert int(state.model_state["int"]) == 5 + bool(active)


def test_join_says_which_rank_leads_in_the_first_of_its_rows(group):
    batches = list(fddp.join([np.zeros((3, 2))], group(1)))
    assert [np.asarray(batch.leads).tolist() for batch in batches] == [[True, False, False]]


def test_join_of_no_batch_at_all_is_an_error(group):
    with pytest.raises(ValueError, match="no batch at all on rank 0; give every rank at least one"):
        list(fddp.join(iter(()), group(1)))
