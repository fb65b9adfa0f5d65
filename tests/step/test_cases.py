"""What a step computes: for each pair of values of two features, what plain JAX computes in
float64; and for random configurations, in the tier `slow`."""

from random import SystemRandom

import jax
import pytest
from cases import TABLE, drawn_of, met, wanted

from bench.configurations import trained
from bench.drawn import draw

# optax.MultiSteps casts sums of complex gradients so.
pytestmark = [
    pytest.mark.steps,
    pytest.mark.filterwarnings("ignore:Casting from complex to real dtypes:DeprecationWarning"),
]


def test_the_table_has_each_pair_of_values_that_go_together():
    assert set.union(*map(met, TABLE)) == set(wanted())


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_a_case_of_the_table_trains_as_by_plain_jax(x64: None, number: int):
    assert trained(drawn_of(number)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("tenth", range(10))
def test_two_hundred_random_configurations_train_as_by_plain_jax_or_are_refused(
    tenth: int, shards: bool
):
    """Of new seeds each time: `bench/configurations.py --seed N --count 1` runs one again."""
    first = SystemRandom().randrange(1_000_000)
    for seed in range(first, first + 10):
        print(f"seed {seed}")  # pytest shows it if one fails
        drawn = draw(seed, shards=shards)
        with jax.enable_x64(drawn.x64):
            trained(drawn)  # raises differences, and errors from outside of fddp
