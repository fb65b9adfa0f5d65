"""Verdicts of the watchers on the reports of all ranks: a rank died, is stuck, or left too early.

Pure functions that need only the standard library: a watcher must not load JAX.

Source: the stall check of Horovod; PyTorch's monitored barrier.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .shared_memory import AFTER_ERROR, BETWEEN, EXITED, FAILED, FINISHED, OF, STEP

AFTER_S = 0.5  # delay of the verdict on a death, for reports of simultaneous deaths
AT_ONCE_S = 0.05  # mpiexec kills the other ranks sooner, and their watchers wake in any order
SILENT_S = 5.0  # longest silence of a running, reachable rank, if a stall is not shorter
LEAST_S = 30.0  # shortest stall by default, in seconds
STEPS = 10  # shortest stall by default, in steps
# The limit is this many times longer for a live rank without a task: it may evaluate or compile.
PATIENCE = 20
HOSTS = ("all_gather", "broadcast", "gather")  # collectives outside of steps

Report = Mapping[str, Any]


class Verdict(NamedTuple):
    """A text for all ranks, and a flag for the end of the job."""

    words: str
    end: bool


def judge(reports: Mapping[int, Report], time_s: float, stall_s: float | None) -> Verdict | None:
    """Judges a job by the ranks' last reports, by the clock of `heard`; None without a fault."""
    every = list[Report]()
    for report in reports.values():
        age_s = time_s - report["heard"]
        ages = {"still": report["still"] + age_s, "lifeless": report["lifeless"] + age_s}
        # `met` is False for a rank whose watcher never sent a message.
        every.append({"met": True, **report, **ages, "unheard": age_s})
    active = [report for report in every if not report["done"]]
    failed = [report for report in every if report["doing"] == FAILED]
    finished = [report for report in every if report["doing"].startswith((FINISHED, EXITED))]
    if dead := [report for report in active if report["gone"]]:
        return report_death(dead, failed, time_s)
    failed_dead = [report for report in failed if report["gone"]]
    for leaver in every:
        for waiter in active:
            waits = waiter["together"] and leaver["calls"] < waiter["calls"]
            # A failed call does not count. A rank that dies is heard of within this time.
            late = waiter["still"] > AFTER_S
            fails = waiter["doing"] == AFTER_ERROR and leaver["calls"] <= waiter["calls"] and late
            if (waits or fails) and (leaver in finished or leaver in failed_dead):
                return report_early_end(leaver, waiter)
    finished = [report for report in finished if not report["gone"]]
    if finished and failed_dead:
        # JAX ends no process before all have reached the end of their scripts.
        first = failed_dead[0]
        words = f"rank {first['rank']} failed after {first['steps'] + first['before']} steps"
        waiter = f"rank {finished[0]['rank']} has finished and waits for it"
        return Verdict(f"{words}, and {waiter}", True)
    fault = stalled(active, stall_s) or missing(active, finished, stall_s)
    return fault or abandoned(active, finished, stall_s) or stopped_at_exit(every, stall_s)


def report_death(dead: Sequence[Report], failed: Sequence[Report], time_s: float) -> Verdict | None:
    """Reports the first death, or the failure that caused it."""
    # Of simultaneous deaths that of a rank without a pending message: a rank with a message waited
    # for another rank, which is more likely the cause.
    end_s = min(report["gone"] for report in dead) + AT_ONCE_S
    simultaneous = [report for report in dead if report["gone"] < end_s]
    first = min(simultaneous, key=lambda report: (bool(report["sending"]), report["gone"]))
    if time_s <= first["gone"] + AFTER_S:
        return None
    if failed:  # a failed rank ends the other ranks itself
        return Verdict(f"rank {failed[0]['rank']} failed", True)
    return Verdict(f"rank {first['rank']} died {where(first)}", True)


def report_early_end(leaver: Report, waiter: Report) -> Verdict:
    """Reports a rank that has left a rank waiting in a call."""
    steps = leaver["steps"] + leaver["before"]
    fails = waiter["doing"] == AFTER_ERROR
    words = f"rank {leaver['rank']} {leaver['doing']} after {steps} steps, "
    words += f"and rank {waiter['rank']} {'is' if fails else 'waits'} {where(waiter)}"
    if leaver["doing"] == FINISHED and leaver["steps"] < waiter["steps"] + fails:
        words += ": give each rank equally many batches, or use fddp.join"
    return Verdict(words, True)


def stalled(reports: Sequence[Report], stall_s: float | None) -> Verdict | None:
    """Reports ranks that wait in a step while no rank makes progress."""
    if not reports:
        return None
    usual_s = longest(reports, stall_s)
    silence_s = silence(reports, stall_s)
    stopped = any(report["stopped"] for report in reports)
    # The first step compiles, and may take any time, unless a signal has stopped a rank.
    waiting = [
        report for report in reports if report["together"] and (report["steps"] > 1 or stopped)
    ]
    # A running watcher reports all the time.
    lost = any(report["unheard"] > usual_s and report["met"] for report in reports)
    if lost:
        # Some ranks wait in messages of a smaller group: only a lost rank is a fault.
        waiting = [report for report in reports if report["together"] or report["sending"]]
    if not waiting:
        return None
    limit_s = usual_s
    # The pace is known after three steps.
    if not (stall_s or lost or stopped or any(report["steps"] > 3 for report in waiting)):
        limit_s *= PATIENCE
    quiet_s = min(report["still"] for report in reports)
    if quiet_s < limit_s:
        return None
    busy = False
    stuck = [report for report in reports if report["lifeless"] > silence_s]
    if not stuck:
        progress = [(report["calls"], report["messages"]) for report in reports]
        least = min(progress)
        stuck = [report for report, count in zip(reports, progress) if count == least]
        # Before the first task of a step a rank may compile.
        busy = all(not report["together"] or report["doing"] == STEP for report in stuck)
    together = [report for report in reports if report["together"]]
    gathering = {report["sending"].startswith("gather") for report in together if report["sending"]}
    waiting += together
    texts = [f"rank {report['rank']} {condition(report, silence_s)}" for report in stuck[:4]]
    if len(stuck) > 4:
        texts.append(f"{len(stuck) - 4} more are behind")
    if blocked := [report for report in reports if report in waiting and report not in stuck]:
        ranks = ", ".join(str(report["rank"]) for report in blocked[:8])
        subject = f"rank {ranks} waits" if len(blocked) == 1 else f"ranks {ranks} wait"
        texts.append(f"{subject} {where(blocked[0])}")
    end_s = 2 * limit_s
    advice = ""
    if busy:
        end_s = max(PATIENCE * usual_s, end_s)
        advice = (
            f". If this goes on for {end_s:g} s all ranks end; "
            "call fddp.alive() in long loops between steps"
        )
    elif len({is_outside(report) for report in together}) > 1 or len(gathering) > 1:
        advice = (
            ". The ranks are in different calls: each rank calls step, save, evaluate and, with "
            "shard='state', no_sync equally often and in the same order"
        )
    end = quiet_s > end_s
    if end:
        limit_s = end_s
    return Verdict(f"nothing has moved for {limit_s:g} s: {'; '.join(texts)}{advice}", end)


def missing(
    active: Sequence[Report], finished: Sequence[Report], stall_s: float | None
) -> Verdict | None:
    """Reports a lifeless rank if finished ranks wait for it. A live rank may take any time."""
    met = [report for report in active if report["met"]]
    if not (met and finished):
        return None
    limit_s = longest(active, stall_s)
    silent = max(met, key=itemgetter("lifeless"))
    # A rank waits only once it has finished. By then a live rank with a dead watcher may have been
    # silent for a long time.
    waited_s = max(report["still"] for report in finished)
    quiet_s = min(silent["lifeless"], waited_s)
    if quiet_s <= limit_s:
        return None
    end_s = PATIENCE * limit_s
    if silent["stopped"] or silent["unheard"] > limit_s:
        end_s = 2 * limit_s
    words = f"rank {silent['rank']} {condition(silent, silence(active, stall_s))}"
    words += f", and rank {finished[0]['rank']} has finished and waits for it"
    return Verdict(words, quiet_s > end_s)


def abandoned(
    active: Sequence[Report], finished: Sequence[Report], stall_s: float | None
) -> Verdict | None:
    """Reports ranks that all wait in smaller groups, whose calls are not counted."""
    waits = [report["sending"] or is_outside(report) * report["doing"] for report in active]
    quiet_s = min((report["still"] for report in active), default=0)
    if not (finished and active and all(waits)) or quiet_s < longest(active, stall_s):
        return None
    ranks = ", ".join(str(report["rank"]) for report in finished)
    words = f"rank {active[0]['rank']} waits for {waits[0]} of a smaller group, and the finished "
    words += f"ranks ({ranks}) send nothing: give each rank of the group equally many batches"
    return Verdict(words, True)


def stopped_at_exit(reports: Sequence[Report], stall_s: float | None) -> Verdict | None:
    """Reports a rank that is stopped after the end of its script, because its job never ends."""
    for report in reports:
        exits = report["done"] and not report["gone"] and report["stopped"]
        if exits and report["lifeless"] > 2 * longest(reports, stall_s):
            steps = report["steps"] + report["before"]
            words = f"rank {report['rank']} {report['doing']} after {steps} steps"
            return Verdict(f"{words}, and its process is stopped", True)
    return None


def longest(reports: Sequence[Report], stall_s: float | None) -> float:
    """Longest time without progress before a stall, in seconds."""
    return stall_s or max(LEAST_S, STEPS * max(report["typical"] for report in reports))


def silence(reports: Sequence[Report], stall_s: float | None) -> float:
    """Longest time without a sign of life, in seconds."""
    return min(SILENT_S, longest(reports, stall_s))


def condition(report: Report, silence_s: float) -> str:
    if report["unheard"] > silence_s:
        return f"has not been heard of, {where(report)} (its host, or the network)"
    if report["stopped"]:
        return f"is stopped {where(report)}"
    if report["lifeless"] > silence_s:
        return (
            f"does not run Python {where(report)} "
            "(a debugger, or a call that blocks the interpreter)"
        )
    return f"is {where(report)}"


def is_outside(report: Report) -> bool:
    """True if a rank is in a collective outside of steps."""
    return report["doing"].split(OF)[0] in HOSTS


def where(report: Report) -> str:
    """Describes the place of a rank in its script."""
    if report["steps"] < 0:
        return "since it fell silent"
    # The number in the training, which may have begun in another process.
    number = report["steps"] + report["before"]
    if report["together"] and is_outside(report):
        collective, _, caller = report["doing"].partition(OF)
        call = f" of {caller}, which all ranks must call," if caller else ""
        return f"in {collective}{call} after step {number}"
    # The place within a task is its name, between tasks the line of the script.
    doing = report["doing"]
    if doing in (BETWEEN, STEP):
        doing = report["place"]
    if doing:
        doing = f", {doing}"
    if report["together"] and report["sending"]:
        return f"in step {number} for {report['sending']}"
    if report["together"]:
        return f"in step {number}{doing}"
    if report["steps"]:
        return f"between steps {number} and {number + 1}{doing}"
    return f"before its first step{doing}"


def judge_alone(
    report: Report, last_heard: float, time_s: float, stall_s: float | None, *, met: bool = True
) -> Verdict | None:
    """Judges a job by one rank's report, once rank 0's watcher is silent, or was never heard."""
    reports = {0: unheard(0, report, last_heard, met=met), report["rank"]: report}
    if time_s - last_heard <= silence([*reports.values()], stall_s):
        return None
    return judge(reports, time_s, stall_s)


def unheard(rank: int, report: Report, last_heard: float, *, met: bool) -> dict[str, Any]:
    """Makes a report for a rank with a silent watcher, based on the report of a listening rank."""
    flags = dict.fromkeys(("together", "stopped", "done"), False)
    texts = dict.fromkeys(("doing", "sending", "place"), "")
    numbers = {"rank": rank, "steps": -1, "calls": -1, "still": 0.0, "lifeless": 0.0}
    return {**report, **flags, **texts, **numbers, "gone": None, "heard": last_heard, "met": met}
