"""Parameters that some ranks use and others do not."""

import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, same_on_all_ranks
from problems import pull, rows

import fddp


@claim()
def a_leaf_is_left_alone_where_no_rank_uses_it_and_reduced_where_one_does(group: fddp.Group):
    names = ("a", "b") if group.rank == 0 else ("b",)
    loss = lambda p, x: sum(jnp.mean(p[name] * x) for name in names)  # noqa: E731
    params = {name: np.ones(2, np.float32) for name in "abc"}
    # With weight decay a zero gradient would move c.
    decay = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0, momentum=0.9))
    options = {"group": group, "find_unused_parameters": True}
    step = fddp.train_step(loss, decay, **options)
    state, info = step(step.init(params), rows(4, 4))
    assert {name: int(n) for name, n in info.used.items()} == {"a": 1, "b": group.size, "c": 0}
    assert sorted(name for bucket in step.plan.buckets for name in bucket.names) == ["a", "b"]
    np.testing.assert_array_equal(state.params["c"], 1)
    np.testing.assert_allclose(state.params["a"], 1 - (2 / group.size + 0.5), rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], 1 - (2 + 0.5), rtol=1e-6)
    trace = state.opt_state[1][0].trace
    np.testing.assert_array_equal(trace["c"], 0)
    assert same_on_all_ranks(group, state)


@claim()
def without_the_option_a_leaf_that_some_ranks_do_not_use_gets_zeros_from_them(group: fddp.Group):
    loss = lambda p, x: jnp.mean(p["a" if group.rank == 0 else "b"] * x)  # noqa: E731
    step = pull(group, loss)
    state, info = step(step.init({name: np.float32(0) for name in "ab"}), rows(4))
    assert info.used is None
    np.testing.assert_allclose(state.params["a"], -4 / group.size, rtol=1e-6)
    np.testing.assert_allclose(state.params["b"], -4 * (group.size - 1) / group.size, rtol=1e-6)
