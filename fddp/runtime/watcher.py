"""The process beside each rank that watches it: the standard library alone, started by `watchdog.py`.

It reads what its rank writes down (`fddp.comm.journal`), tells it to the watcher of rank 0, which judges
(`verdicts.py`), and ends its rank when the job is to end. It shares no interpreter with its rank, so that a rank that
is stopped, held in a debugger or killed cannot silence it. Lines of JSON travel, to who knows the job's token.

Source: PyTorch's NCCL watchdog; the monitor process of NVIDIA's resiliency extension.
"""

import hmac
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

EVERY_S = 0.25
STOP_S, LEAST_S = 1.5, 1e-3  # so long until all have heard where they are to stop, if a step takes no less than this
LAST_S = 5.0  # so long the watcher of a rank that died waits for what the others' say of it
MOST = 1 << 16  # bytes of a line


def main(job: dict[str, Any], judge: Callable[..., Any], judge_alone: Callable[..., Any]) -> None:
    """Watches until its rank has ended.

    Args:
      job: where the journal lies and how, who the others are, and how long a stall is.
      judge: of `verdicts.py`.
      judge_alone: likewise.
    """
    # Who ends a job signals all that belongs to it, and the last word is the watchers'.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):  # who dies first is seen by who wakes first; not every user may ask for it
        os.nice(-10)
    memory, rank = mmap(job["memory"], job["bytes"]), job["rank"]
    read, died = reader(memory, job), death(job["parent"])
    door, links = meet(memory, job)
    ears = [*([door] if door else []), *pidfd(job["parent"])]
    reports: dict[int, dict[str, Any]] = {}
    said, before, sent, stop = "", None, 0.0, Stop(0, False)
    heard = born = time.monotonic()
    while True:
        ready, _, _ = select.select([*ears, *links], [], [], EVERY_S)
        if door and door in ready:
            welcome(door, links, job["token"])
        now, verdicts = time.monotonic(), list[Any]()
        for line in [line for link in list(links) if link in ready for line in lines(link, links)]:
            heard = now
            if "words" in line:
                verdicts.append(line)
            elif "step" in line:
                stop = Stop(line["step"], line["settled"])
            elif "rank" in line:
                gone = None if line["gone"] is None else now - line["gone"]
                reports[line["rank"]] = line | {"heard": now, "gone": gone}
        own = reports[rank] = read() | {"gone": died(), "heard": now}
        ears = ears[: bool(door)] if own["gone"] else ears
        all_here = len(reports) == job["size"] or now > born + LAST_S
        if rank:
            found = judge_alone(own, heard, now, job["stall_s"])
        else:
            found = judge(reports, now, job["stall_s"]) if all_here else None
            stop = stop_of(reports, stop)
        struct.pack_into(job["proposal"], memory, job["proposed"], *stop)
        verdicts += [found._asdict()] if found else []
        news = own["gone"] and not before
        # Not to every line an answer, or the watchers would do nothing else.
        if news or now > sent + EVERY_S:
            # Hosts have clocks of their own: how long ago is the same on all.
            ago = None if own["gone"] is None else now - own["gone"]
            send(links, own | {"gone": ago} if rank else stop._asdict())
            sent, before = now, own["gone"]
        for verdict in [] if rank else verdicts:
            send(links, verdict)
        for verdict in verdicts:
            if not own["done"] and verdict["words"] != said:
                said = verdict["words"]
                say(f"rank {rank} of {job['size']}: {said}.")
            if verdict["end"]:
                # Rank 0 last: on JAX's service, which it holds, the others' processes would end in words of their own.
                wait_for_others({} if rank else links, 2 * job["grace_s"])
                if rank == 0:
                    say(f"`python -m fddp flight {job['flight']}` tells what each rank sent last.")
                return end(memory, job, own, said, died)
        over = own["gone"] and (own["done"] or now > own["gone"] + LAST_S)
        if over and (rank or not links):
            return None


class Stop(NamedTuple):
    """After which step all ranks stop: 0 if nobody was told to; and whether all have agreed."""

    step: int
    settled: bool


def stop_of(reports: Mapping[int, Mapping[str, Any]], stop: Stop) -> Stop:
    """What the watchers propose, from what the ranks have answered to the last proposal."""
    going = [one for one in reports.values() if not one["done"]]
    if stop.settled or not any(one["told"] for one in going):
        return stop
    if stop.step and all(one["agreed"] == stop.step for one in going):
        return Stop(stop.step, True)
    if stop.step and not any(one["agreed"] == -stop.step for one in going):
        return stop
    # No rank is to reach it before all have heard of it.
    ahead = max(STOP_S / max(one["between_s"], LEAST_S) for one in going)
    return Stop(max(one["asks"] for one in going) + 1 + int(ahead), False)


def say(text: str) -> None:
    """Writes a line to the rank's stderr, if somebody still reads there."""
    with suppress(OSError):
        print(f"fddp: {text}", file=sys.stderr, flush=True)


### The rank


def reader(memory: mmap, job: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Makes a function that reads what the rank wrote down."""
    head, answer = struct.Struct(job["head"]), struct.Struct(job["answer"])
    lived, changed = -1, time.monotonic()

    def text(place: int) -> str:
        return memory[place : place + job["text"]].rstrip(b"\0").decode(errors="replace")

    def read() -> dict[str, Any]:
        nonlocal lived, changed
        counts = dict(zip(job["heads"], head.unpack_from(memory, 0)))
        life, moved = counts.pop("life"), counts.pop("moved")
        now = time.monotonic()
        if life != lived:
            lived, changed = life, now
        return {
            "rank": job["rank"],
            "still": now - moved,
            "lifeless": now - changed,
            "doing": text(job["doing"]),
            "done": text(job["doing"]) in job["done"],
            "sending": text(job["sending"]),
            "stopped": stopped(job["parent"]),
            "told": bool(memory[job["stopping"]]),
            **counts,
            **dict(zip(("asks", "between_s", "agreed"), answer.unpack_from(memory, job["answered"]))),
        }

    return read


def stopped(process: int) -> bool:
    """Whether a process was stopped, by a signal or a debugger; where there is no /proc nobody knows."""
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def death(parent: int) -> Callable[[], float | None]:
    """Makes a function that tells when the process that started this one ended."""
    at: float | None = None

    def died() -> float | None:
        nonlocal at
        if at is None and os.getppid() != parent:
            at = time.monotonic()
        return at

    return died


def pidfd(process: int) -> list[int]:
    """What becomes ready at once when a process ends; nothing where the system has no such thing."""
    try:
        return [os.pidfd_open(process)] if hasattr(os, "pidfd_open") else []
    except OSError:
        return []


def end(
    memory: mmap, job: Mapping[str, Any], own: Mapping[str, Any], words: str, died: Callable[[], float | None]
) -> None:
    """Ends the rank: it is asked to, and killed if it does not hear; writes down what it sent last."""
    record(memory, job, own, words)
    struct.pack_into(job["verdict"], memory, job["ending"], True, words.encode()[:511])
    until = time.monotonic() + job["grace_s"]
    while not died() and time.monotonic() < until:
        time.sleep(0.05)
    if not died():
        os.kill(job["parent"], signal.SIGKILL)


def record(memory: mmap, job: Mapping[str, Any], own: Mapping[str, Any], words: str) -> None:
    """Writes the last messages of the rank to a file, for `python -m fddp flight`."""
    layout, now = struct.Struct(job["message"]), time.monotonic()
    rows = [layout.unpack_from(memory, job["ring"] + k * layout.size) for k in range(job["messages"])]
    sent = [
        {
            "number": number,
            "step": step + own["before"],
            "name": name.rstrip(b"\0").decode(errors="replace"),
            "nbytes": nbytes,
            "began_s": begin - now,
            "took_s": stop - begin if stop else None,
        }
        for number, step, begin, stop, nbytes, name in sorted(rows)
        if begin
    ]
    own = {"rank": own["rank"], "steps": own["steps"] + own["before"], "doing": own["doing"]}
    told = own | {"size": job["size"], "why": words}
    with suppress(OSError):
        folder = Path(job["flight"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{job['rank']}.json").write_text(json.dumps(told | {"messages": sent}, indent=1))


### The other watchers

Links = dict[socket.socket, bytearray]


def meet(memory: mmap, job: Mapping[str, Any]) -> tuple[socket.socket | None, Links]:
    """The door of rank 0's watcher, or the way there."""
    if job["rank"] == 0:
        door = socket.create_server((job["bind"], 0), backlog=job["size"])
        struct.pack_into("<Q", memory, job["port"], door.getsockname()[1])
        return door, {}
    for host, port in job["addresses"]:
        try:
            link = socket.create_connection((host, port), timeout=2.0)
            link.sendall(job["token"].encode() + b"\n")
            return None, {link: bytearray()}
        except OSError:
            continue
    say(f"rank {job['rank']} of {job['size']} reaches no watcher at {job['addresses']}.")
    return None, {}


def welcome(door: socket.socket, links: Links, token: str) -> None:
    """Takes in who knows the token; others are not answered."""
    link, _ = door.accept()
    link.settimeout(1.0)
    try:
        said = b""
        while len(said) <= len(token) and not said.endswith(b"\n"):
            more = link.recv(len(token) + 1 - len(said))
            if not more:
                break
            said += more
        if hmac.compare_digest(said, token.encode() + b"\n"):
            links[link] = bytearray()
            return
    except OSError:
        pass
    link.close()


def lines(link: socket.socket, links: Links) -> Iterator[dict[str, Any]]:
    """What came; a link that ends or says what is no line of ours is closed."""
    buffer = links[link]
    try:
        more = link.recv(MOST)
        buffer += more
        *whole, rest = bytes(buffer).split(b"\n")
        said = [json.loads(line) for line in whole]
        if not more or len(rest) > MOST or not all(isinstance(line, dict) for line in said):
            raise ValueError
        links[link] = bytearray(rest)
        yield from said
    except (OSError, ValueError):
        del links[link]
        link.close()


def wait_for_others(links: Links, seconds: float) -> None:
    """Waits until the watchers of other ranks have ended theirs, and themselves."""
    until = time.monotonic() + seconds
    while links and time.monotonic() < until:
        ready, _, _ = select.select([*links], [], [], EVERY_S)
        for link in ready:
            list(lines(link, links))


def send(links: Links, line: Mapping[str, Any]) -> None:
    text = json.dumps(line).encode() + b"\n"
    for link in list(links):
        try:
            link.sendall(text)
        except OSError:
            del links[link]
            link.close()
