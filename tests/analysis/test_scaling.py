"""Steps on more replicas than this machine has, against values by hand and the shape of the
paper's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.analysis.tuning.link import Link
from fddp.analysis.tuning.scaling import hop_of, project, ring, tree

HOP = Link(latency_s=0.001, bytes_per_s=1e9)
MB = 10**6


def test_a_ring_sends_nearly_twice_the_array_and_two_messages_per_other_replica():
    assert ring(HOP, 100 * MB, 2) == pytest.approx(2 * 0.001 + 0.1)
    assert ring(HOP, 100 * MB, 256) == pytest.approx(510 * 0.001 + 0.2 * 255 / 256)


def test_a_tree_pays_the_latency_of_its_depth():
    assert tree(HOP, 100 * MB, 256) == pytest.approx(2 * 8 * 0.001 + 0.2)
    assert tree(HOP, 0, 4096) < ring(HOP, 0, 4096) / 100


@pytest.mark.parametrize("algorithm", [ring, tree])
def test_one_replica_sends_nothing(algorithm):
    assert algorithm(HOP, MB, 1) == 0


@given(st.sampled_from([ring, tree]), st.integers(2, 512), st.floats(0, 1e9))
def test_the_hop_of_an_all_reduce_makes_that_all_reduce_again(algorithm, replicas, nbytes):
    link = Link(0.003, 2e8)
    assert algorithm(hop_of(link, replicas, algorithm), nbytes, replicas) == pytest.approx(
        link.seconds(nbytes)
    )


def test_a_single_replica_says_nothing_of_a_link():
    with pytest.raises(ValueError, match="1 replica"):
        hop_of(HOP, 1)


def test_a_projection_simulates_the_step_with_the_algorithms_all_reduces():
    # All-reduces among four: 2·3·(0 + 10/4/10) = 1.5 s each. Stages end at 2 and 3; sent 2–3.5 and
    # 3.5–5; update 1 s.
    (projected,) = project([2.0, 1.0], [10, 10], Link(0.0, 10.0), updates=[1.0], replicas=[4])
    assert (projected.step_s, projected.exposed_s, projected.efficiency) == (6.0, 2.0, 4 / 6)


def test_more_replicas_never_make_a_step_shorter_and_a_ring_flattens_out():
    """Iterations get longer from 1 to 256 replicas in Fig. 9 of the paper, though each replica
    sends hardly more from 16 on."""
    steps = [projected.step_s for projected in project([0.05] * 4, [25 * MB] * 4, Link(1e-6, 5e8))]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(0.2)
    # 2 → 8 replicas, 64 → 256
    early = steps[3] - steps[1]
    growth_at_64 = steps[8] - steps[6]
    assert growth_at_64 < early / 5
    slow = [projected.step_s for projected in project([0.05] * 4, [25 * MB] * 4, Link(1e-3, 5e8))]
    assert slow[9] > 2 * 4095 * 1e-3 * 4  # 4,096 replicas: four buckets' latencies alone


def test_a_model_with_more_bytes_per_second_of_computation_suffers_more():
    """BERT and ResNet-50 compare in this way in the paper's Fig. 9."""
    small, large = (
        project([0.1] * 4, [size] * 4, Link(1e-5, 5e8), replicas=[256])[0]
        for size in (25 * MB, 110 * MB)
    )
    assert large.efficiency < small.efficiency < 1


def test_a_hidden_traffic_costs_nothing_at_any_scale():
    for projected in project([1.0, 1.0], [1000, 1], Link(1e-9, 1e12), replicas=[2, 4096]):
        assert projected.efficiency > 0.999
