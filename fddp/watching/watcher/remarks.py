"""Remarks on a job that goes on, each made once: which rank is slow, which accumulates another number of batches.

Pure functions, as those of `verdicts.py`.

Source: the straggler detection of NVIDIA's resiliency extension, which compares each rank with the median.
"""

from collections.abc import Mapping
from statistics import median

from .verdicts import Report

STEPS = 20  # that every rank has taken before one is called a straggler
LEAST_S = 0.01  # a straggler takes so many seconds longer: less comes and goes with the operating system
TIMES = 3  # a straggler takes so many times as long as the others, in three of four steps
SHARE = 0.5  # of a step, that a straggler's own part takes at least: else the others do not wait for it


def remarks(reports: Mapping[int, Report]) -> dict[str, str]:
    """Finds in the reports of all ranks what is worth telling, and no reason to end.

    Args:
      reports: of each rank that was heard, the last.

    Returns:
      Remarks, by what they are about; about each thing one is made once.
    """
    going = {rank: one for rank, one in reports.items() if not one["done"] and not one["gone"]}
    return straggler(going) | unequal(going)


def straggler(going: Mapping[int, Report]) -> dict[str, str]:
    """The rank for which the others wait, step after step."""
    if len(going) < 2 or any(one["steps"] < STEPS or not one["inside"] for one in going.values()):
        return {}
    # In a step of one program nobody sees who computes and who waits: whoever is last does not wait.
    least = min(one["inside"] for one in going.values())
    times = {rank: (one["between"], one["computing"] or least) for rank, one in going.items()}
    slow = max(times, key=lambda rank: sum(times[rank]))
    between, computing = (median(x) for x in zip(*(times[rank] for rank in times if rank != slow)))
    own = sum(times[slow])
    theirs = between + computing
    if not theirs or own < max(TIMES * theirs, theirs + LEAST_S) or own < SHARE * going[slow]["typical"]:
        return {}
    mostly = times[slow][0] - between > times[slow][1] - computing
    where = "most of it between steps (its input, say)" if mostly else "most of it computing"
    factor = f"{own / theirs:.1f} times as long as the others ({_time(theirs)})"
    return {f"straggler {slow}": f"rank {slow} is slow: its own part of a step takes {_time(own)}, {factor}, {where}"}


def unequal(going: Mapping[int, Report]) -> dict[str, str]:
    """Ranks that have come to the same step with unequally many batches."""
    if not going:
        return {}
    last = max(one["calls"] for one in going.values())
    # A rank that waits in a call is at most one call ahead of a rank that has not come to it.
    before = [(one["added_before"] if one["calls"] == last else one["added"], one) for one in going.values()]
    reached = [(one["added"], one) for one in going.values() if one["calls"] == last]
    for ranks in (reached, [each for each in before if each[1]["calls"] >= last - 1]):
        (least, few), (most, many) = (choose(ranks, key=lambda each: each[0]) for choose in (min, max))
        if least != most:
            more = f"rank {many['rank']} has called no_sync {most} times by step {many['steps'] + many['before']}"
            words = f"{more}, and rank {few['rank']} {least} times: call it equally often on each rank, or they will "
            return {"no_sync": words + "not have equally many steps"}
    return {}


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
