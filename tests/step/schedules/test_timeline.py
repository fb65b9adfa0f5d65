"""Spans and the stamps of messages have the values that a hand computes."""

from fddp.comm import Stamps
from fddp.step.schedules.timeline import Span, Timeline, timeline_of


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


def message(name: str, *times: float) -> Stamps:
    """Started, sent, received, awaited, resumed, done."""
    return Stamps(0, 0, 8, *times, name.encode())


OVERLAPPED = (
    message("bucket 0", 12, 12, 16, 15, 16, 16),
    message("bucket 1", 14, 16, 20, 18, 20, 21),
)


def test_a_stage_ends_where_a_message_starts_and_an_update_where_a_program_waits():
    line = timeline_of(OVERLAPPED, 10)
    assert [(x.name, x.start, x.end) for x in (*line.compute, *line.updates)] == [
        ("stage 0", 10, 12),
        ("stage 1", 12, 14),
        ("stage 2", 14, 15),
        ("update 0", 16, 18),
        ("update 1", 20, 21),
    ]
    assert [(x.name, x.start, x.end) for x in line.communication] == [
        ("bucket 0", 12, 16),
        ("bucket 1", 16, 20),
    ]


def test_traffic_for_which_a_program_does_not_wait_is_overlapped():
    line = timeline_of(OVERLAPPED, 10)
    assert (line.communicating, line.exposed, line.overlap_share) == (8, 3, 5 / 8)


def test_messages_awaited_at_once_overlap_with_nothing():
    line = timeline_of((message("sum", 1, 1, 3, 1, 3, 3), message("bucket 0", 4, 4, 9, 4, 9, 9)), 0)
    assert (line.exposed, line.overlap_share, line.computing) == (7, 0, 2)


def test_of_a_message_of_the_last_step_a_step_has_what_travels_in_it():
    late = message("bucket 1", 4, 8, 13, 12, 13, 13), message("bucket 0", 15, 15, 18, 17, 18, 18)
    line = timeline_of(late, 10)
    assert [(x.start, x.end) for x in line.communication] == [(10, 13), (15, 18)]
    assert (line.seconds, line.exposed) == (8, 2)


def test_a_printed_row_has_a_messages_times_and_its_place_in_the_step():
    _, row, foot = str(timeline_of((message("bucket 0", 1, 2, 6, 5, 7, 8),), 0)).splitlines()
    *times, drawn = row.split()
    assert times == ["bucket", "0", "1000.00", "2000.00", "6000.00", "5000.00", "8000.00"]
    assert drawn == 4 * "." + 4 * "-" + 12 * "=" + 8 * "!" + 4 * "."
    assert foot.startswith("8000.00 ms, 1000.00 ms of communication exposed, 75% of all")
