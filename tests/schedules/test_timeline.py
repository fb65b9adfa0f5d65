"""Claims about spans and simulated steps, checked against values by hand: `fddp.timeline`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fddp.schedules.tasks import Communicate, Compute
from fddp.schedules.timeline import Pace, Span, Timeline, observed_pace, outline, simulate
from fddp.schedules.values import Value


def compute(*times):
    return [Span("compute", f"stage {k}", a, b) for k, (a, b) in enumerate(times)]


def send(*times):
    return [Span("communication", f"bucket {k}", a, b) for k, (a, b) in enumerate(times)]


def step(stages, sends=(), updates=()):
    """The spans of a staged step, and its tasks."""
    used = [Span("update", f"update {k}", a, b) for k, (a, b) in enumerate(updates)]
    return Timeline((*compute(*stages), *send(*sends), *used), outline(stages, sends, updates)[0])


def test_exposed_is_the_traffic_beside_which_nothing_is_computed():
    line = Timeline((*compute((0, 2), (2, 3)), *send((2, 5), (5, 6))))
    assert (line.seconds, line.exposed, line.overlap_share) == (6, 3, 0.25)


def test_all_is_exposed_when_traffic_comes_after():
    line = Timeline((*compute((0, 4)), *send((4, 5), (5, 7))))
    assert (line.exposed, line.overlap_share) == (3, 0)


def test_the_bound_starts_an_all_reduce_when_its_stage_is_done_and_the_link_is_free():
    # Stages of 2, 1, 1 s; all-reduces of 2, 2, 1 s: ready at 2, 3, 4; sent 2-4, 4-6, 6-7; then an
    # update of 1 s.
    line = step([(0, 2), (2, 3), (3, 4)], [(4, 6), (6, 8), (8, 9)], [(9, 10)])
    assert line.bound() == 8


def test_a_step_without_traffic_is_bounded_by_its_computation():
    assert step([(0, 2), (2, 5)]).bound() == 5
    assert Timeline(tuple(compute((0, 2)))).overlap_share == 0
    assert Timeline(()).seconds == 0


def test_the_bound_of_the_baseline_counts_every_all_reduce():
    # One program of 4 s, then all-reduces of 1 and 2 s: with nothing to lie under, 7 s it is.
    assert step([(0, 4)], [(4, 5), (5, 7)]).bound() == 7


### Simulated steps


def times(line, kind):
    return [(span.start, span.end) for span in line.spans if span.kind == kind]


def test_a_simulated_all_reduce_waits_for_its_stage_and_for_the_link():
    line = simulate(*outline([2, 1, 1], [2, 2, 1], [1]))
    assert times(line, "compute") == [(0, 2), (2, 3), (3, 4)]
    assert times(line, "update") == [(7, 8)]
    assert times(line, "communication") == [(2, 4), (4, 6), (6, 7)]


def test_a_simulated_update_waits_for_all_stages_and_for_its_all_reduce():
    # Stages end at 4; all-reduces at 4, 6 and 7: updates of 1 s from 4, 6 and 7 on.
    line = simulate(*outline([2, 1, 1], [2, 2, 1], [1, 1, 1]))
    assert times(line, "update") == [(4, 5), (6, 7), (7, 8)]


def test_a_bound_lets_updates_run_while_later_buckets_travel():
    assert step([(0, 2), (2, 3), (3, 4)], [(4, 6), (6, 8), (8, 9)], [(9, 10)] * 3).bound() == 8


def test_a_link_that_is_free_waits_for_the_next_stage():
    line = simulate(*outline([1, 5], [1, 1]))
    assert times(line, "communication") == [(1, 2), (6, 7)]


def test_a_pace_slows_both_only_while_both_are_under_way():
    # From 2 s on stage 1 goes at half its speed; its 1 s takes until 4, when the all-reduce, at
    # 3/4, has 0.5 s left.
    line = simulate(*outline([2, 1], [2, 1]), pace=Pace(compute=0.5, communication=0.75))
    assert times(line, "compute") == [(0, 2), (2, 4)]
    assert times(line, "communication") == [(2, 4.5), (4.5, 5.5)]


def test_the_pace_that_was_simulated_is_the_pace_that_is_observed():
    pace = Pace(compute=0.8, communication=0.6)
    stages = [2.0, 1.5, 1.0, 4.0]
    sends = [1.0, 2.0, 0.5, 1.0]
    observed = observed_pace(simulate(*outline(stages, sends), pace=pace), sum(stages), sum(sends))
    assert abs(observed.compute - pace.compute) < 1e-9
    assert abs(observed.communication - pace.communication) < 1e-9


def test_without_overlap_or_loss_the_pace_is_one():
    assert observed_pace(Timeline((*compute((0, 2)), *send((2, 3)))), 1, 1) == Pace(1, 1)
    assert observed_pace(Timeline((*compute((0, 2)), *send((1, 3)))), 2.5, 2.5) == Pace(1, 1)


### Any step


lengths = st.lists(st.floats(0.01, 5), min_size=1, max_size=6)


@given(lengths, st.data())
def test_no_order_of_events_beats_the_bound(stages, data):
    """Any run in which an all-reduce waits for its stage and for the link ends at the bound or
    later."""
    sends = data.draw(st.lists(st.floats(0.01, 5), min_size=len(stages), max_size=len(stages)))
    gap = data.draw(st.floats(0, 1))
    clock = 0.0
    link = 0.0
    computed = []
    traffic = []
    for length, duration in zip(stages, sends):
        computed.append((clock, clock + length))
        clock += length + gap
        start = max(clock, link)
        traffic.append((start, start + duration))
        link = start + duration
    line = step(computed, traffic)
    assert line.bound() <= line.seconds + 1e-9
    assert 0 <= line.overlap_share <= 1 + 1e-9
    assert line.exposed <= sum(sends) + 1e-9


def test_the_printed_timeline_tells_the_end_and_what_is_exposed():
    line = step([(10, 10.002)], [(10.002, 10.005)])
    assert str(line).endswith(
        "5.00 ms, 3.00 ms of communication exposed, 0% of all under computation; bound 5.00 ms"
    )
    assert str(Timeline(line.spans)).endswith(
        "0% of all under computation"
    )  # of spans alone nothing follows


### Any list


def test_a_list_on_paper_waits_for_what_it_reads_and_for_nothing_else():
    """A gather of this step's shards runs under the next forward pass: one step cannot hide it."""
    tasks = [
        Compute("forward 0", (Value("whole", 0),), (Value("x"),)),
        Compute("forward 1", (Value("whole", 1), Value("x")), (Value("y"),)),
        Communicate("gather 0", (), (Value("whole", 0),)),
        Communicate("gather 1", (), (Value("whole", 1),)),
        Compute("backward", (Value("y"),), (Value("message", 0),)),
        Communicate("scatter 0", (Value("message", 0),), (Value("shard", 0),)),
    ]
    seconds = {
        "forward 0": 2,
        "forward 1": 2,
        "backward": 3,
        "gather 0": 1,
        "gather 1": 4,
        "scatter 0": 1,
    }
    line = simulate(tasks, seconds)
    assert times(line, "communication") == [(0, 1), (1, 5), (10, 11)]
    assert times(line, "compute") == [(1, 3), (5, 7), (7, 10)]


def test_a_list_in_which_a_task_waits_for_ever_is_refused():
    tasks = [
        Compute("a", (Value("sum", 0),), (Value("message", 0),)),
        Communicate("b", (Value("message", 0),), (Value("sum", 0),)),
    ]
    with pytest.raises(ValueError, match="a and b would wait forever"):
        simulate(tasks, {})
