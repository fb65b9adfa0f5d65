"""Remarks on a running job: a slow rank, or unequal numbers of accumulated batches.

Pure functions, as in `verdicts.py`.

Source: the straggler detection of NVIDIA's resiliency extension, which compares each rank with the
median.
"""

from collections.abc import Mapping
from statistics import median

from .verdicts import Report

STEPS = 20  # steps of every rank before a rank may count as a straggler
LEAST_S = 0.01  # least delay of a straggler: the operating system causes shorter delays
TIMES = 3  # least ratio of a straggler's time to the median, in three of four steps
SHARE = 0.5  # least share of a straggler's local part in a step: else no rank waits for it


def remarks(reports: Mapping[int, Report]) -> dict[str, str]:
    """Returns subject → remark from the last report of each rank. A remark ends no job."""
    active = {
        rank: report
        for rank, report in reports.items()
        if not report["done"] and not report["gone"]
    }
    return straggler(active) | unequal(active)


def straggler(reports: Mapping[int, Report]) -> dict[str, str]:
    """Names a rank that delays all others in most steps."""
    if len(reports) < 2 or any(
        report["steps"] < STEPS or not report["inside"] for report in reports.values()
    ):
        return {}
    # In a step of one program the waits are unknown. Its shortest duration is that of the last
    # rank, which does not wait.
    least = min(report["inside"] for report in reports.values())
    times = {
        rank: (report["between"], report["computing"] or least) for rank, report in reports.items()
    }
    slow = max(times, key=lambda rank: sum(times[rank]))
    between, computing = (median(x) for x in zip(*(times[rank] for rank in times if rank != slow)))
    slow_s = sum(times[slow])
    median_s = between + computing
    if (
        not median_s
        or slow_s < max(TIMES * median_s, median_s + LEAST_S)
        or slow_s < SHARE * reports[slow]["typical"]
    ):
        return {}
    mostly = times[slow][0] - between > times[slow][1] - computing
    where = "most of it between steps (its input, say)" if mostly else "most of it computing"
    factor = f"{slow_s / median_s:.1f} times as long as the others ({_time(median_s)})"
    return {
        f"straggler {slow}": f"rank {slow} is slow: its own part of a step takes {_time(slow_s)}, "
        f"{factor}, {where}"
    }


def unequal(reports: Mapping[int, Report]) -> dict[str, str]:
    """Names two ranks with different numbers of accumulated batches in the same step."""
    if not reports:
        return {}
    last = max(report["calls"] for report in reports.values())
    # A rank that waits in a call is at most one call ahead of the other ranks.
    previous_call = [
        (report["added_before"] if report["calls"] == last else report["added"], report)
        for report in reports.values()
    ]
    last_call = [
        (report["added"], report) for report in reports.values() if report["calls"] == last
    ]
    for counts in (last_call, [pair for pair in previous_call if pair[1]["calls"] >= last - 1]):
        (least, few), (most, many) = (
            choose(counts, key=lambda pair: pair[0]) for choose in (min, max)
        )
        if least != most:
            excess = (
                f"rank {many['rank']} has called no_sync {most} times by step "
                f"{many['steps'] + many['before']}"
            )
            words = (
                f"{excess}, and rank {few['rank']} {least} times: call it equally often on each "
                "rank, or they will "
            )
            return {"no_sync": words + "not have equally many steps"}
    return {}


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
