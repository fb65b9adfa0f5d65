"""Random states in shards train as plain JAX does in float64, or fddp explains why they cannot.

`bench/` draws the configurations and computes plain JAX's results: `bench/configurations.py
--shards` draws more.
"""

import jax
import pytest

from bench.configurations import trained
from bench.drawn_shards import draw_shards

pytestmark = pytest.mark.steps
MANY = 300
FEW = range(3)


# optax.MultiSteps casts sums of complex gradients so.
@pytest.mark.quick("1", "2")
@pytest.mark.filterwarnings("ignore:Casting from complex to real dtypes:DeprecationWarning")
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in range(MANY)]
)
def test_a_random_configuration_trains_as_plain_jax_or_is_refused(seed: int):
    drawn = draw_shards(seed)
    with jax.enable_x64(drawn.x64):
        trained(drawn)  # what differs, and an error that is not fddp's own, is raised


def test_what_is_drawn_has_all_that_shards_go_with():
    drawn = [draw_shards(seed) for seed in range(MANY)]
    assert {one.options["shard"] for one in drawn} == {"optimizer", "state"}
    assert {one.options["schedule"] for one in drawn} == {"fused", "staged", "eager", "after"}
    assert {"", "bf16", "fp16"} <= {one.hook for one in drawn}
    assert {1, 2, 4} <= {one.hosts for one in drawn}
    assert {"multi_transform", "decay of some", "momentum of some"} <= {
        one.optimizer for one in drawn
    }
    assert {"rows", "joined"} <= {one.rows for one in drawn}
    for has in (
        lambda one: "reshard_after_forward" in one.options,
        lambda one: "accumulation_steps" in one.options,
        lambda one: "bucket_cap_mb" in one.options,
        lambda one: "statistics" in one.form,
        lambda one: one.narrow,
        lambda one: {"complex64", "complex128"} & {*one.dtypes.values()},
        lambda one: {"float32", "bfloat16"} <= {*one.dtypes.values()},
    ):
        assert any(map(has, drawn))
