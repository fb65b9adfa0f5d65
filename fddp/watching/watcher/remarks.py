"""Remarks on a running job: a slow rank, or unequal numbers of accumulated batches.

Pure functions, as in `verdicts.py`.

Source: the straggler detection of NVIDIA's resiliency extension, which compares each rank with the
median.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from statistics import median

from .verdicts import Report

STEPS = 20  # steps of every rank before a rank may count as a straggler
LEAST_S = 0.01  # least delay of a straggler: the operating system causes shorter delays
TIMES = 3  # least ratio of a straggler's time to the median, in three of four steps
SHARE = 0.5  # least share of a straggler's local part in a step: else no rank waits for it


def remarks(reports: Mapping[int, Report]) -> dict[str, str]:
    """Returns subject → remark from the last report of each rank. A remark ends no job."""
    active = [report for report in reports.values() if not (report["done"] or report["gone"])]
    return straggler(active) | unequal(active)


def straggler(reports: Sequence[Report]) -> dict[str, str]:
    """Names a rank that delays all others in most steps."""
    if len(reports) < 2 or any(r["steps"] < STEPS or not r["inside"] for r in reports):
        return {}
    # In a step of one program the waits are unknown. Its shortest duration is that of the last
    # rank, which does not wait.
    least = min(report["inside"] for report in reports)

    def computing_s(report: Report) -> float:
        return report["computing"] or least

    slow = max(reports, key=lambda report: report["between"] + computing_s(report))
    faster = [report for report in reports if report is not slow]
    between = median(report["between"] for report in faster)
    computing = median(map(computing_s, faster))
    slow_s = slow["between"] + computing_s(slow)
    median_s = between + computing
    least_s = max(TIMES * median_s, median_s + LEAST_S, SHARE * slow["typical"])
    if not median_s or slow_s < least_s:
        return {}
    where = "most of it computing"
    if slow["between"] - between > computing_s(slow) - computing:
        where = "most of it between steps (its input, say)"
    factor = f"{slow_s / median_s:.1f} times as long as the others ({_time(median_s)})"
    return {
        f"straggler {slow['rank']}": f"rank {slow['rank']} is slow: its own part of a step takes "
        f"{_time(slow_s)}, {factor}, {where}"
    }


def unequal(reports: Sequence[Report]) -> dict[str, str]:
    """Names two ranks with different numbers of accumulated batches in the same step."""
    last = max((report["calls"] for report in reports), default=0)
    last_call = list[tuple[int, Report]]()
    previous_call = list[tuple[int, Report]]()
    for report in reports:
        if report["calls"] == last:
            last_call.append((report["added"], report))
            previous_call.append((report["added_before"], report))
        # A rank that waits in a call is at most one call ahead of the other ranks.
        elif report["calls"] == last - 1:
            previous_call.append((report["added"], report))
    for counts in filter(None, (last_call, previous_call)):
        least, few = min(counts, key=itemgetter(0))
        most, many = max(counts, key=itemgetter(0))
        if least != most:
            step = many["steps"] + many["before"]
            words = (
                f"rank {many['rank']} has called no_sync {most} times by step {step}, and rank "
                f"{few['rank']} {least} times: call it equally often on each rank, or they will "
                "not have equally many steps"
            )
            return {"no_sync": words}
    return {}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms"
