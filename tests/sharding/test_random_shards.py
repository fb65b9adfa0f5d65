"""Random states in shards train as plain JAX does in float64, or fddp explains why they cannot.

`bench/` draws the configurations and computes plain JAX's results: `bench/configurations.py
--shards` draws more.
"""

import jax
import pytest

from bench.configurations import trained
from bench.drawn import draw

pytestmark = pytest.mark.steps
MANY = 120  # `bench/configurations.py --shards` draws further ones
FEW = range(3)


# optax.MultiSteps casts sums of complex gradients so.
@pytest.mark.quick("1", "2")
@pytest.mark.filterwarnings("ignore:Casting from complex to real dtypes:DeprecationWarning")
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.slow]) for n in range(MANY)]
)
def test_a_random_configuration_trains_as_plain_jax_or_is_refused(seed: int):
    drawn = draw(seed, shards=True)
    with jax.enable_x64(drawn.x64):
        trained(drawn)  # raises differences, and errors from outside of fddp


def test_what_is_drawn_has_all_that_shards_go_with():
    drawn = [draw(seed, shards=True) for seed in range(MANY)]
    assert {configuration.options["shard"] for configuration in drawn} == {"optimizer", "state"}
    assert {"overlap", "after"} <= {
        configuration.options.get("schedule") for configuration in drawn
    }
    assert {"", "bf16", "fp16"} <= {configuration.hook for configuration in drawn}
    assert {1, 2, 4} <= {configuration.hosts for configuration in drawn}
    assert {"multi_transform", "decay of some", "momentum of some"} <= {
        configuration.optimizer for configuration in drawn
    }
    assert {"rows", "joined"} <= {configuration.rows for configuration in drawn}
    for has in (
        lambda configuration: "accumulation_steps" in configuration.options,
        lambda configuration: "bucket_cap_mb" in configuration.options,
        lambda configuration: "statistics" in configuration.form,
        lambda configuration: configuration.narrow,
        lambda configuration: {"complex64", "complex128"} & {*configuration.dtypes.values()},
        lambda configuration: {"float32", "bfloat16"} <= {*configuration.dtypes.values()},
    ):
        assert any(map(has, drawn))
