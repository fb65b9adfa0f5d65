"""Groups that take the buckets in turn; several processes are held to it in
`on_ranks/round_robin.py`."""

import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fddp

pytestmark = pytest.mark.steps


def test_staged_has_as_many_all_reduces_under_way_as_there_are_links(group):
    two: fddp.Group = group(2)
    both = threading.Barrier(2)
    carried: dict[str, list[int]] = {"first": [], "second": []}

    def link(name: str) -> Any:
        def reduce(x: jax.Array) -> jax.Array:
            carried[name].append(x.size)
            both.wait(timeout=30)  # no rank goes on alone
            return one_at_a_time(x)

        return two.transport._replace(all_reduce=reduce)

    # The devices of one process would wait for each other if programs reached them in different
    # orders.
    lock = threading.Lock()

    def one_at_a_time(x: jax.Array) -> jax.Array:
        with lock:
            return two.transport.all_reduce(x)

    transport = two.transport._replace(clones=(link("first"), link("second")))
    params = {name: np.ones(n, np.float32) for n, name in enumerate("abcd", 1)}
    loss = lambda p, x: sum(jnp.mean(w) for w in p.values()) * jnp.mean(x)  # noqa: E731
    options: dict[str, Any] = {"schedule": "staged", "bucket_cap_mb": 0, "order": "reverse"}
    step = fddp.train_step(loss, optax.sgd(1.0), group=replace(two, transport=transport), **options)
    state, _ = step(step.init(params), np.ones(2, np.float32))
    loss_and_weight = 2
    assert carried == {"first": [2 * (4 + loss_and_weight), 2 * 2], "second": [2 * 3, 2 * 1]}
    for n, name in enumerate("abcd", 1):
        np.testing.assert_allclose(state.params[name], 1 - 1 / n, rtol=1e-6)


def test_no_groups_are_an_error_and_groups_of_other_devices_too(group):
    with pytest.raises(ValueError, match="at least one group, got none"):
        fddp.round_robin([])
    with pytest.raises(ValueError, match=r"group 0 is 2 replicas .*, group 2 is 4 replicas"):
        fddp.round_robin([group(2), group(2), group(4)])


def test_several_devices_of_a_process_stay_on_one_link(group):
    assert fddp.round_robin([group(4)] * 3).transport.clones == (group(4).transport,)
