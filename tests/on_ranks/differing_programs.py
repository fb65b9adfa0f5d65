"""Ranks whose losses are different programs, by branches in Python."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from on_ranks.claims import claim, error_of, same_on_all_ranks, schedules

import fddp
from fddp.step.checks import verify_collectives


@claim()
def ranks_whose_branches_in_python_differ_sum_every_bucket(group: fddp.Group):
    def loss(
        p: Any, x: Any
    ) -> jax.Array:  # as many numbers in the bucket of a and in that of b, loss and weight too
        first = jnp.mean(x @ p["a"])
        return first + jnp.sum(p["b"] * x[0, 0]) if group.rank else first

    params = {"a": np.zeros((4, 4), np.float32), "b": np.zeros(18, np.float32)}
    share = (group.size - 1) / group.size
    for schedule in schedules(group):
        step = fddp.train_step(
            loss, optax.sgd(1.0), group=group, schedule=schedule, bucket_cap_mb=0
        )
        state, info = step(step.init(params), np.ones((2, 4), np.float32))
        assert len(step.plan.buckets) == 2
        assert np.all(np.asarray(state.params["a"]) == -0.25), schedule
        np.testing.assert_allclose(
            np.asarray(state.params["b"]), -share, rtol=1e-6, err_msg=schedule
        )
        assert same_on_all_ranks(group, (state.params, info.loss)), schedule


# Two sums of equal arrays.
SWAPPED = """HloModule step, is_scheduled=true

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main {
  x = f32[8] parameter(0)
  first = f32[8] all-reduce(x), replica_groups={}, to_apply=add, @"jit(spread)/bucketFIRST/psum"}
  ROOT then = f32[8] all-reduce(x), replica_groups={}, to_apply=add, @"jit(spread)/bucketTHEN/psum"}
}
""".replace("@", "metadata={op_name=")


class Lowered:
    """Stands in for the program of one rank."""

    def __init__(self, text: str) -> None:
        self.text = text

    def compile(self) -> Any:
        return self

    def as_text(self) -> str:
        return self.text


@claim()
def messages_in_another_order_are_named_on_every_rank_though_they_are_equally_long(
    group: fddp.Group,
):
    order = ("1", "0") if group.rank else ("0", "1")
    text = SWAPPED.replace("FIRST", order[0]).replace("THEN", order[1])
    program: Any = Lowered(text)
    message = error_of(lambda: verify_collectives(group, program))
    for line in message.splitlines()[1:]:
        first, second = (
            ("bucket0", "bucket1") if line.startswith("rank 0:") else ("bucket1", "bucket0")
        )
        assert line.index(f"({first})") < line.index(f"({second})"), message
