"""A straight line through measured all-reduces."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.analysis.tuning.link import Link, fit_link

SIZES = [4.0**k * 1024 for k in range(7)]


@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e11))
def test_the_fit_recovers_latency_and_bandwidth(latency, bandwidth):
    link = fit_link(SIZES, [latency + size / bandwidth for size in SIZES])
    assert (
        link.bytes_per_s == pytest.approx(bandwidth, rel=1e-3)
        or SIZES[-1] / bandwidth < 1e-3 * latency
    )
    assert (
        link.latency_s == pytest.approx(latency, rel=1e-3) or latency < 1e-3 * SIZES[0] / bandwidth
    )


def test_a_small_message_counts_as_much_as_a_large_one():
    # 10 % too long at one end of the sizes or the other: the line is off by about as much there,
    # not by 16,000 times.
    times = np.array([1e-3 + size / 1e8 for size in SIZES])
    first = times * [1.1, *[1] * 6]
    last = times * [*[1] * 6, 1.1]
    errors = [
        max(abs(fit_link(SIZES, list(t)).seconds(s) / e - 1) for s, e in zip(SIZES, t))
        for t in (first, last)
    ]
    assert max(errors) < 0.1


def test_noise_does_not_make_a_latency_negative_or_a_link_faster_than_light():
    assert fit_link([1e3, 1e6], [1e-6, 1e-2]).latency_s == 0
    assert fit_link([1e3, 1e6], [2e-3, 1e-3]).bytes_per_s == np.inf
    assert Link(1e-3, np.inf).seconds(1e9) == 1e-3


@pytest.mark.parametrize(
    "sizes, times", [([1], [1]), ([1, 1], [1, 2]), ([1, 2], [1]), ([1, 2], [0, 1])]
)
def test_a_fit_says_what_it_needs(sizes, times):
    with pytest.raises(ValueError, match="got"):
        fit_link(sizes, times)
