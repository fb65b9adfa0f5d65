"""An island's door to the keeper of the shared parameters, which is started beside rank 0.

No wait is for ever: the keeper shows twice a second that it lives, and one that does not for as long as nothing may
move in the job (`fddp.init(stall_s=)`) is an error.
"""

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import numpy as np

from fddp.buckets import is_shard
from fddp.comm import Group, new_secret, nothing_to_compare, on_one_host, own_addresses, signature, verify
from fddp.jax_internals import packed
from fddp.local_training.frames import hear, hear_arrays, tell
from fddp.local_training.island_runner import Keeper
from fddp.local_training.island_state import Island, leaves_of, version_of
from fddp.local_training.keeper import Job
from fddp.local_training.merging import Contribution, SharedParams, merge_forms, merging_of
from fddp.optim import LocalSteps
from fddp.step import TrainState

CONNECT_S = 5.0
RUN = "import sys; sys.path.insert(0, sys.argv[1]); from fddp.local_training.keeper import main; main()"


class Place(NamedTuple):
    """The address of the keeper."""

    addresses: list[str]
    port: int
    token: str


def join_keeper(steps: LocalSteps, island: Island, state: TrainState) -> Keeper:
    """Starts the keeper beside rank 0, and connects this island with it; every rank calls it before it trains alone.

    Args:
      steps: the optimizer.
      island: this process's.
      state: this island's first state. Where a training goes on, the newest shared parameters of all islands count.

    Returns:
      The keeper.

    Raises:
      RuntimeError: it does not start, or cannot be reached; on every rank.
    """
    group = island.replica.group
    newest = _newest(group, state)
    hosts = ["127.0.0.1"] if on_one_host(group) else own_addresses()

    def start() -> Place | None:
        if not group.is_main:
            return None
        return _start(steps, group.processes // island.members.processes, newest, state, hosts)

    place = group.broadcast_object(verify(group, "keeper of the shared parameters", start, nothing_to_compare))
    members = island.members

    def connect() -> socket.socket | Any:
        return _connect(place, group, island.number) if members.is_main else None

    door = verify(group, "way to the keeper", connect, nothing_to_compare)
    if members.is_main:
        atexit.register(door.close)

    def told(ask: Callable[[], SharedParams], like: SharedParams) -> SharedParams:
        """The keeper's answer to the island's first process, on all of them."""

        def asked() -> SharedParams:
            with _words(group, door):
                return ask()

        if members.processes == 1:
            return asked()
        answer = verify(members, "exchange", lambda: asked() if members.is_main else like, nothing_to_compare)
        version, *leaves = members.broadcast((np.int64(answer.version), answer.params, answer.outer))
        return SharedParams(int(version), *leaves)

    def give(given: Contribution) -> SharedParams:
        line = {"began": given.began, "weight": given.weight, "step": given.step}

        def ask() -> SharedParams:
            with group.journal.message("pseudo-gradient", sum(x.nbytes for x in given.change)):
                tell(door, line, given.change)
                return _answer(door, newest._replace(outer=()))

        return told(ask, newest._replace(outer=()))

    def meet() -> SharedParams:
        def ask() -> SharedParams:
            tell(door, {"meets": True})
            return _answer(door, newest)

        with group.journal.call("meet", group.processes):
            return told(ask, newest)

    return Keeper(give, meet)


def _newest(group: Group, state: TrainState) -> SharedParams:
    """The newest shared parameters of all islands, and the outer optimizer's state that the same island has."""
    versions = group.all_gather(np.int64(version_of(state)))
    newest = leaves_of(state.opt_state.shared), leaves_of(state.opt_state.outer)
    if versions.any():  # islands that begin anew have equal parameters
        newest = group.broadcast(newest, root=int(np.argmax(versions)))
    return SharedParams(int(versions.max()), *newest)


def _start(steps: LocalSteps, islands: int, shared: SharedParams, state: TrainState, hosts: list[str]) -> Place:
    """Starts the keeper as a process of this host."""
    rule: Any = steps.quorum
    tree = jax.tree.structure(state.opt_state.shared, is_leaf=is_shard)
    params = tree.unflatten(shared.params)
    add, step = map(lambda f, forms: packed(f, *forms), merging_of(steps, params), merge_forms(shared))
    token = new_secret()
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    bind = hosts[0] if hosts == ["127.0.0.1"] else ""
    job = Job(replace(rule, discount=None), islands, shared, add, step, token, bind, x64)
    if rule.log and not shared.version:
        Path(rule.log).write_text("")
    # A session of its own: what stops or ends the group of processes of rank 0 must leave it.
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", RUN, str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
    process.returncode = 0  # nobody waits for it
    ins: IO[bytes] | Any = process.stdin
    outs: IO[bytes] | Any = process.stdout
    os.dup(ins.fileno())  # held until this process ends, whatever becomes of the step: then the keeper ends, too
    with ins, outs:
        pickle.dump(job, ins)
        ins.flush()
        port = outs.readline().strip()
    if not port:
        raise RuntimeError("the keeper of the shared parameters did not start: see what it has printed.")
    return Place(hosts, int(port), token)


def _connect(place: Place, group: Group, island: int) -> socket.socket:
    """Connects this island with the keeper."""
    failures = []
    for host in place.addresses:
        try:
            door = socket.create_connection((host, place.port), CONNECT_S)
            challenge = hear(door)["challenge"]
        except (OSError, KeyError) as error:
            failures.append(f"{host}:{place.port}: {getattr(error, 'strerror', None) or error}")
            continue
        limit = group.journal.stall_s
        door.settimeout(limit if isfinite(limit) else None)
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tell(door, {"proof": signature(place.token, challenge), "island": island})
        return door
    raise RuntimeError(f"the keeper of the shared parameters, beside rank 0, cannot be reached: {'; '.join(failures)}.")


def _answer(door: socket.socket, like: SharedParams) -> SharedParams:
    """Waits for the newest shared parameters."""
    while "version" not in (line := hear(door)):
        if "fails" in line:
            raise RuntimeError(f"the keeper of the shared parameters failed:\n{line['fails']}")
    return SharedParams(line["version"], *(hear_arrays(door, leaves) for leaves in (like.params, like.outer)))


@contextmanager
def _words(group: Group, door: socket.socket) -> Iterator[None]:
    """Says in words what an error of the connection means, and closes it: words may have broken off in the middle."""
    try:
        yield
    except TimeoutError:
        door.close()
        limit = group.journal.stall_s
        raise RuntimeError(
            f"rank {group.rank} has heard nothing for {limit:g} s of the keeper of the shared parameters, a process "
            "beside rank 0: its host, or the network."
        ) from None
    except OSError as error:
        door.close()
        raise RuntimeError(
            f"the keeper of the shared parameters, a process beside rank 0, has ended ({error}): start again from a "
            "checkpoint."
        ) from None
