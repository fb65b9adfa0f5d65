"""Ranks that train separately for some steps."""

import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import RATE, square

import fddp


@claim()
def ranks_that_train_separately_send_nothing_and_then_agree(group: fddp.Group):
    batches = np.sin(np.arange(6 * 4 * group.size, dtype=np.float32)).reshape(6, group.size, 4)
    inner = optax.sgd(RATE, momentum=0.5)
    optimizer = fddp.local_steps(inner, outer=optax.sgd(0.7), every=2, start=1)
    step = fddp.train_step(square, optimizer, group=group)
    state = step.init(jnp.zeros(()))
    sent = []
    local = np.zeros(group.size)
    speed = np.zeros(group.size)
    shared = 0.0
    for number, batch in enumerate(batches, start=1):
        state, info = step(state, batch[group.rank])
        sent.append(bool(np.asarray(info.sent).any()))
        grads = 2 * (local - batch.mean(axis=1))
        speed = 0.5 * speed + (grads.mean() if number == 1 else grads)
        local = local - RATE * speed
        if number == 1:
            shared = local[0]
        elif number in (3, 5):
            shared -= 0.7 * (shared - np.mean(local))
            local = np.full(group.size, shared)
    assert sent == [True, False, True, False, True, False]
    np.testing.assert_allclose(float(state.params), shared, rtol=1e-5)
    gathered = fddp.whole(state, group=group)
    np.testing.assert_allclose(gathered.opt_state.params, local, rtol=1e-5)
    assert same_on_all_ranks(group, gathered)
    mean = fddp.evaluate(square, state, [batches[0][group.rank]], group=group)
    np.testing.assert_allclose(mean, np.mean((batches[0] - shared) ** 2), rtol=1e-5)
