"""Verdicts of the watchers on the reports of all ranks: a rank died, is stuck, or left too early.

Pure functions that need only the standard library: a watcher must not load JAX.

Source: the stall check of Horovod; PyTorch's monitored barrier.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .shared_memory import BETWEEN, FAILED, FINISHED, STEP

AFTER_S = 0.5  # delay of the verdict on a death, for reports of simultaneous deaths
AT_ONCE_S = 0.05  # mpiexec kills the other ranks sooner, and their watchers wake in any order
SILENT_S = 5.0  # longest silence of a running, reachable rank, if a stall is not shorter
LEAST_S = 30.0  # shortest stall by default, in seconds
STEPS = 10  # shortest stall by default, in steps
# The limit is this many times longer for a live rank without a task: it may evaluate or compile.
PATIENCE = 20

Report = Mapping[str, Any]


class Verdict(NamedTuple):
    """A text for all ranks, and a flag for the end of the job."""

    words: str
    end: bool


def judge(reports: Mapping[int, Report], time_s: float, stall_s: float | None) -> Verdict | None:
    """Judges a job by the last report of each rank; None without a fault.

    `time_s` is the time on the clock of the reports' `heard`.
    """
    active = {rank: report for rank, report in reports.items() if not report["done"]}
    failed = [report for report in reports.values() if report["doing"] == FAILED]
    dead = [report for report in active.values() if report["gone"]]
    if dead:
        first = first_of(dead)
        # A failed rank ends the other ranks itself.
        words = (
            f"rank {failed[0]['rank']} failed"
            if failed
            else f"rank {first['rank']} died {where(first)}"
        )
        return Verdict(words, True) if time_s > first["gone"] + AFTER_S else None
    waiting = [report for report in active.values() if report["together"]]
    leavers = [
        report
        for report in reports.values()
        if report["doing"] == FINISHED or (report in failed and report["gone"])
    ]
    pairs = [
        (leaver, waiter)
        for leaver in leavers
        for waiter in waiting
        if leaver["calls"] < waiter["calls"]
    ]
    if pairs:
        leaver, waiter = pairs[0]
        how = f"{leaver['doing']} after {leaver['steps'] + leaver['before']} steps"
        shorter = leaver not in failed and leaver["steps"] < waiter["steps"]
        advice = ": give each rank equally many batches, or use fddp.join" * shorter
        return Verdict(
            f"rank {leaver['rank']} {how}, and rank {waiter['rank']} waits {where(waiter)}{advice}",
            True,
        )
    finished = [
        report for report in reports.values() if report["doing"] == FINISHED and not report["gone"]
    ]
    if finished and (short := [report for report in failed if report["gone"]]):
        # JAX ends no process before all have reached the end of their scripts.
        steps = short[0]["steps"] + short[0]["before"]
        words = (
            f"rank {short[0]['rank']} failed after {steps} steps, "
            f"and rank {finished[0]['rank']} has finished"
        )
        return Verdict(f"{words} and waits for it", True)
    return stalled(active, time_s, stall_s) or missing(active, finished, time_s, stall_s)


def first_of(dead: Sequence[Report]) -> Report:
    """Picks the rank that died first; of simultaneous deaths preferably one without a message."""
    simultaneous = [
        report
        for report in dead
        if report["gone"] < min(candidate["gone"] for candidate in dead) + AT_ONCE_S
    ]
    # A rank with a pending message waited for another rank, which is more likely the cause.
    return min(simultaneous, key=lambda report: (bool(report["sending"]), report["gone"]))


def stalled(reports: Mapping[int, Report], time_s: float, stall_s: float | None) -> Verdict | None:
    """Reports ranks that wait in a step while no rank makes progress."""
    if not reports:
        return None
    limit_s = longest(reports, stall_s)
    silence_s = silence(reports, stall_s)
    # The first step compiles, and may take any time. The pace is known after three steps.
    waiting = [report for report in reports.values() if report["together"] and report["steps"] > 1]
    pace_known = stall_s or any(report["steps"] > 3 for report in waiting)
    # A running watcher reports all the time.
    if lost := any(
        time_s - report["heard"] > limit_s and report.get("met", True)
        for report in reports.values()
    ):
        # Islands wait in messages between themselves: only a lost island is a fault.
        waiting = [report for report in reports.values() if report["together"] or report["sending"]]
    if not waiting:
        return None
    usual_s = limit_s
    limit_s = limit_s if pace_known or lost else PATIENCE * limit_s
    quiet_s = min(report["still"] + time_s - report["heard"] for report in reports.values())
    if quiet_s < limit_s:
        return None
    lifeless = [
        report
        for report in reports.values()
        if report["lifeless"] + time_s - report["heard"] > silence_s
    ]
    least = min((report["calls"], report["messages"]) for report in reports.values())
    stuck = lifeless or [
        report for report in reports.values() if (report["calls"], report["messages"]) == least
    ]
    blocked = [
        report
        for report in reports.values()
        if report not in stuck and (report["together"] or report in waiting)
    ]
    texts = [
        f"rank {report['rank']} {condition(report, time_s, silence_s)}" for report in stuck[:4]
    ]
    texts += [f"{len(stuck) - 4} more are behind"] if len(stuck) > 4 else []
    if blocked:
        ranks = ", ".join(str(report["rank"]) for report in blocked[:8])
        texts.append(
            f"rank{'s' * (len(blocked) > 1)} {ranks} wait{'s' * (len(blocked) == 1)} "
            f"{where(blocked[0])}"
        )
    # Before the first task of a step a rank may compile.
    busy = not lifeless and all(not r["together"] or r["doing"] == STEP for r in stuck)
    end_s = max(PATIENCE * usual_s, 2 * limit_s) if busy else 2 * limit_s
    words = f"nothing has moved for {limit_s:g} s: {'; '.join(texts)}"
    if busy:
        words += (
            f". If this goes on for {end_s:g} s all ranks end; "
            "call fddp.alive() in long loops between steps"
        )
    return Verdict(
        words.replace(f"for {limit_s:g} s:", f"for {end_s:g} s:") if quiet_s > end_s else words,
        quiet_s > end_s,
    )


def missing(
    active: Mapping[int, Report], finished: Sequence[Report], time_s: float, stall_s: float | None
) -> Verdict | None:
    """Reports a lifeless rank if finished ranks wait for it. A live rank may take any time."""
    silences = [
        (report["lifeless"] + time_s - report["heard"], report)
        for report in active.values()
        if report.get("met", True)
    ]
    if not (silences and finished):
        return None
    limit_s = longest(active, stall_s)
    quiet_s, silent = max(silences, key=lambda pair: pair[0])
    # A rank waits only once it has finished. By then a live rank with a dead watcher may have been
    # silent for a long time.
    quiet_s = min(quiet_s, max(report["still"] + time_s - report["heard"] for report in finished))
    end_s = (
        2 * limit_s
        if silent["stopped"] or time_s - silent["heard"] > limit_s
        else PATIENCE * limit_s
    )
    text = f"rank {silent['rank']} {condition(silent, time_s, silence(active, stall_s))}"
    words = f"{text}, and rank {finished[0]['rank']} has finished and waits for it"
    return Verdict(words, quiet_s > end_s) if quiet_s > limit_s else None


def longest(reports: Mapping[int, Report], stall_s: float | None) -> float:
    """Longest time without progress before a stall, in seconds."""
    return stall_s or max(LEAST_S, STEPS * max(report["typical"] for report in reports.values()))


def silence(reports: Mapping[int, Report], stall_s: float | None) -> float:
    """Longest time without a sign of life, in seconds."""
    return min(SILENT_S, longest(reports, stall_s))


def condition(report: Report, time_s: float, silence_s: float) -> str:
    """Describes the condition of a rank."""
    if time_s - report["heard"] > silence_s:
        return f"has not been heard of, {where(report)} (its host, or the network)"
    if report["stopped"]:
        return f"is stopped {where(report)}"
    if report["lifeless"] > silence_s:
        return (
            f"does not run Python {where(report)} "
            "(a debugger, or a call that blocks the interpreter)"
        )
    return f"is {where(report)}"


def where(report: Report) -> str:
    """Describes the place of a rank in its script."""
    if report["steps"] < 0:
        return "since it fell silent"
    # The number in the training, which may have begun in another process.
    number = report["steps"] + report["before"]
    if report["together"] and report["doing"] in ("all_gather", "broadcast"):
        return f"in {report['doing']} after step {number}"
    # The place within a task is its name, between tasks the line of the script.
    doing = report["place"] if report["doing"] in (BETWEEN, STEP) else report["doing"]
    doing = f", {doing}" if doing else ""
    if report["together"]:
        return f"in step {number}" + (f" for {report['sending']}" if report["sending"] else doing)
    return (
        f"between steps {number} and {number + 1}" if report["steps"] else "before its first step"
    ) + doing


def judge_alone(
    report: Report, last_heard: float, time_s: float, stall_s: float | None, *, met: bool = True
) -> Verdict | None:
    """Judges a job by the report of one rank, once rank 0's watcher is silent since `last_heard`.

    `met` is False if rank 0's watcher never sent a message.
    """
    reports = {0: unheard(0, report, last_heard, met=met), report["rank"]: report}
    return (
        judge(reports, time_s, stall_s) if time_s - last_heard > silence(reports, stall_s) else None
    )


def unheard(rank: int, report: Report, last_heard: float, *, met: bool) -> dict[str, Any]:
    """Makes a report for a rank with a silent watcher, based on the report of a listening rank.

    `met` is False if the watcher never sent a message: then the rank may be in its first steps.
    """
    unknown = {
        "steps": -1,
        "calls": -1,
        "still": 0.0,
        "lifeless": 0.0,
        "together": False,
        "stopped": False,
    }
    nowhere = {"doing": "", "sending": "", "place": "", "gone": None, "done": False}
    return {**report, **unknown, **nowhere, "rank": rank, "heard": last_heard, "met": met}
