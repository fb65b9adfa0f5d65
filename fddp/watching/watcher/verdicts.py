"""Verdicts of the watchers on the reports of all ranks: which rank died, is stuck, or left too early.

Pure functions of the standard library alone: a watcher shares nothing with its rank, JAX included.

Source: the stall check of Horovod; PyTorch's monitored barrier.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .shared_memory import BETWEEN, FAILED, FINISHED, STEP

AFTER_S = 0.5  # so long after the first death all ranks that died with it are known
AT_ONCE_S = 0.05  # mpiexec kills the others sooner, and their watchers wake in any order
SILENT_S = 5.0  # a rank without a sign of life for so long, or for a stall, does not run or cannot be reached
LEAST_S = 30.0  # a stall is no shorter than this, unless the user says so
STEPS = 10  # nor shorter than so many steps
PATIENCE = 20  # a rank that lives and runs no task may be evaluating or compiling: it has so many times as long

Report = Mapping[str, Any]


class Verdict(NamedTuple):
    """Words for all ranks, and whether they are to end."""

    words: str
    end: bool


def judge(reports: Mapping[int, Report], now: float, stall_s: float | None) -> Verdict | None:
    """Judges a job by the reports of all ranks.

    Args:
      reports: of each rank that was heard, the last.
      now: seconds of the clock by which they were heard.
      stall_s: how long nothing may move; None: 30 s, or ten steps if they take longer.

    Returns:
      The verdict, or None if all is well.
    """
    going = {rank: one for rank, one in reports.items() if not one["done"]}
    failed = [one for one in reports.values() if one["doing"] == FAILED]
    dead = [one for one in going.values() if one["gone"]]
    if dead:
        first = first_of(dead)
        # A rank that fails ends the others itself.
        words = f"rank {failed[0]['rank']} failed" if failed else f"rank {first['rank']} died {where(first)}"
        return Verdict(words, True) if now > first["gone"] + AFTER_S else None
    waiting = [one for one in going.values() if one["together"]]
    left = [one for one in reports.values() if one["doing"] == FINISHED or (one in failed and one["gone"])]
    early = [(one, other) for one in left for other in waiting if one["calls"] < other["calls"]]
    if early:
        one, other = early[0]
        how = f"{one['doing']} after {one['steps'] + one['before']} steps"
        shorter = one not in failed and one["steps"] < other["steps"]
        advice = ": give each rank equally many batches, or use fddp.join" * shorter
        return Verdict(f"rank {one['rank']} {how}, and rank {other['rank']} waits {where(other)}{advice}", True)
    over = [one for one in reports.values() if one["doing"] == FINISHED and not one["gone"]]
    if over and (short := [one for one in failed if one["gone"]]):
        # JAX ends no process before all have come to the end of their scripts.
        steps = short[0]["steps"] + short[0]["before"]
        words = f"rank {short[0]['rank']} failed after {steps} steps, and rank {over[0]['rank']} has finished"
        return Verdict(f"{words} and waits for it", True)
    return stalled(going, now, stall_s) or missing(going, over, now, stall_s)


def first_of(dead: Sequence[Report]) -> Report:
    """Picks the rank that died first; of those that died at once, one that waited for no other's part of a message."""
    at_once = [one for one in dead if one["gone"] < min(other["gone"] for other in dead) + AT_ONCE_S]
    return min(at_once, key=lambda one: (bool(one["sending"]), one["gone"]))


def stalled(going: Mapping[int, Report], now: float, stall_s: float | None) -> Verdict | None:
    """Judges whether ranks wait in a step while none moves."""
    if not going:
        return None
    limit = longest(going, stall_s)
    silent = silence(going, stall_s)
    # The first step compiles, and may take any time; how long one takes is known after three.
    waiting = [one for one in going.values() if one["together"] and one["steps"] > 1]
    known = stall_s or any(one["steps"] > 3 for one in waiting)
    # A watcher is heard of all the time.
    if lost := any(now - one["heard"] > limit and one.get("met", True) for one in going.values()):
        # Islands wait in messages of their own. One that is slow or stopped is no fault; one that is lost never comes.
        waiting = [one for one in going.values() if one["together"] or one["sending"]]
    if not waiting:
        return None
    usual = limit
    limit = limit if known or lost else PATIENCE * limit
    quiet = min(one["still"] + now - one["heard"] for one in going.values())
    if quiet < limit:
        return None
    lifeless = [one for one in going.values() if one["lifeless"] + now - one["heard"] > silent]
    least = min((one["calls"], one["messages"]) for one in going.values())
    behind = lifeless or [one for one in going.values() if (one["calls"], one["messages"]) == least]
    others = [one for one in going.values() if one not in behind and (one["together"] or one in waiting)]
    told = [f"rank {one['rank']} {condition(one, now, silent)}" for one in behind[:4]]
    told += [f"{len(behind) - 4} more are behind"] if len(behind) > 4 else []
    if others:
        ranks = ", ".join(str(one["rank"]) for one in others[:8])
        told.append(f"rank{'s' * (len(others) > 1)} {ranks} wait{'s' * (len(others) == 1)} {where(others[0])}")
    # Before the first task of a step a rank may be compiling.
    busy = not lifeless and all(not one["together"] or one["doing"] == STEP for one in behind)
    most = max(PATIENCE * usual, 2 * limit) if busy else 2 * limit
    words = f"nothing has moved for {limit:g} s: {'; '.join(told)}"
    if busy:
        words += f". If this goes on for {most:g} s all ranks end; call fddp.alive() in long loops between steps"
    return Verdict(words.replace(f"for {limit:g} s:", f"for {most:g} s:") if quiet > most else words, quiet > most)


def missing(going: Mapping[int, Report], over: Sequence[Report], now: float, stall_s: float | None) -> Verdict | None:
    """Judges whether ranks that have finished wait for one that does not run; one that runs may take any time."""
    still = [(one["lifeless"] + now - one["heard"], one) for one in going.values() if one.get("met", True)]
    if not (still and over):
        return None
    limit = longest(going, stall_s)
    quiet, one = max(still, key=lambda pair: pair[0])
    # Nobody waits before he has finished: one whose watcher alone is lost may long have been unheard by then.
    quiet = min(quiet, max(one["still"] + now - one["heard"] for one in over))
    most = 2 * limit if one["stopped"] or now - one["heard"] > limit else PATIENCE * limit
    told = f"rank {one['rank']} {condition(one, now, silence(going, stall_s))}"
    words = f"{told}, and rank {over[0]['rank']} has finished and waits for it"
    return Verdict(words, quiet > most) if quiet > limit else None


def longest(reports: Mapping[int, Report], stall_s: float | None) -> float:
    """Seconds for which nothing may move."""
    return stall_s or max(LEAST_S, STEPS * max(one["typical"] for one in reports.values()))


def silence(reports: Mapping[int, Report], stall_s: float | None) -> float:
    """Seconds for which a rank may give no sign of life."""
    return min(SILENT_S, longest(reports, stall_s))


def condition(one: Report, now: float, silent: float) -> str:
    """The condition of a rank, as far as it can be seen from outside."""
    if now - one["heard"] > silent:
        return f"has not been heard of, {where(one)} (its host, or the network)"
    if one["stopped"]:
        return f"is stopped {where(one)}"
    if one["lifeless"] > silent:
        return f"does not run Python {where(one)} (a debugger, or a call that holds the interpreter)"
    return f"is {where(one)}"


def where(one: Report) -> str:
    """The place of a rank in its script."""
    if one["steps"] < 0:
        return "since it fell silent"
    number = one["steps"] + one["before"]  # of the training, which may have begun in another process
    if one["together"] and one["doing"] in ("all_gather", "broadcast"):
        return f"in {one['doing']} after step {number}"
    # The name of a task says where the rank is; between tasks the line of its script does.
    doing = one["place"] if one["doing"] in (BETWEEN, STEP) else one["doing"]
    doing = f", {doing}" if doing else ""
    if one["together"]:
        return f"in step {number}" + (f" for {one['sending']}" if one["sending"] else doing)
    return (f"between steps {number} and {number + 1}" if one["steps"] else "before its first step") + doing


def judge_alone(own: Report, heard: float, now: float, stall_s: float | None, *, met: bool = True) -> Verdict | None:
    """Judges on one rank alone, whose watcher no longer hears that of rank 0: that is where it was last heard of.

    Args:
      own: its report.
      heard: when rank 0 was last heard of.
      now: seconds of the same clock.
      stall_s: how long nothing may move.
      met: whether it was heard of at all.

    Returns:
      The verdict, or None as long as nobody knows that anything is wrong.
    """
    reports = {0: unheard(0, own, heard, met=met), own["rank"]: own}
    return judge(reports, now, stall_s) if now - heard > silence(reports, stall_s) else None


def unheard(rank: int, own: Report, heard: float, *, met: bool) -> dict[str, Any]:
    """Makes the report of a rank whose watcher is not heard.

    Args:
      rank: its number.
      own: the report of the rank that does not hear it.
      heard: when it was heard of last, or could have been.
      met: whether it ever was: if not, nobody knows what it does in the first steps.

    Returns:
      Its report.
    """
    unknown = {"steps": -1, "calls": -1, "still": 0.0, "lifeless": 0.0, "together": False, "stopped": False}
    nowhere = {"doing": "", "sending": "", "place": "", "gone": None, "done": False}
    return {**own, **unknown, **nowhere, "rank": rank, "heard": heard, "met": met}
