"""Claims about spans, checked against values by hand: `fddp.timeline`."""

from fddp.schedules.timeline import Span, Timeline


def compute(*times):
    return [Span("compute", f"stage {k}", a, b) for k, (a, b) in enumerate(times)]


def send(*times):
    return [Span("communication", f"bucket {k}", a, b) for k, (a, b) in enumerate(times)]


def test_exposed_is_the_traffic_beside_which_nothing_is_computed():
    line = Timeline((*compute((0, 2), (2, 3)), *send((2, 5), (5, 6))))
    assert (line.seconds, line.exposed, line.overlap_share) == (6, 3, 0.25)


def test_all_is_exposed_when_traffic_comes_after():
    line = Timeline((*compute((0, 4)), *send((4, 5), (5, 7))))
    assert (line.exposed, line.overlap_share) == (3, 0)


def test_a_step_without_traffic_or_without_spans_overlaps_nothing():
    assert Timeline(tuple(compute((0, 2)))).overlap_share == 0
    assert Timeline(()).seconds == 0


def test_the_printed_timeline_tells_the_end_and_what_is_exposed():
    line = Timeline((*compute((10, 10.002)), *send((10.002, 10.005))))
    assert str(line).endswith(
        "5.00 ms, 3.00 ms of communication exposed, 0% of all under computation"
    )
