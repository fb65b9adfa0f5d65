"""Messages of a lane over TCP: a connection for each pair of ranks, served by the lane's thread.

XLA cannot carry them: at most 32 computations of a device are in flight, and those that wait for
the lane leave no place for one of its own. A sum travels block by block: one is on the wire while
another is added. Each element is added in order of ranks, so that all ranks have the same bits.
"""

import select
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from fddp.program import Kind

BLOCK_BYTES = 1 << 19  # of all ranks: what is added lies in a cache
PIECE_BYTES = 1 << 15  # for one rank, while another one sends elsewhere
SMALL_BYTES = 1 << 16  # a small array is sent whole, in one round in place of two

Arrays: TypeAlias = Sequence[np.ndarray] | np.ndarray


class SocketSend:
    """Exchanges arrays with the other ranks of a group; a `Send` for one thread at a time."""

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        levels: Sequence[Sequence[int]] = (),
        names: Sequence[int] | None = None,
    ) -> None:
        """`connections` are those to the other ranks, whose numbers in the job are `names`.

        `levels` has the ranks on this host, and those at this rank's position on all hosts, if sums
        go over hosts first.
        """
        self._rank = rank
        self._ranks = range(len(connections) + 1)
        self._levels = levels
        names = names or self._ranks
        self._peers = {k: _Peer(x, names[k]) for k, x in connections.items()}
        self._outgoing = deque[tuple[_Peer, memoryview]]()
        self._incoming = deque[tuple[_Peer, memoryview]]()
        self._rooms = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(2)]
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __del__(self) -> None:
        # No exit handler: other ranks may wait then, and the watchers say for whom.
        for peer in self._peers.values():
            peer.connection.close()

    def __call__(self, kind: Kind, array: np.ndarray) -> None:
        """Exchanges an array in place; ConnectionError if a rank has closed its connection."""
        if kind == "exchange":
            self._swap(self._ranks, array.copy(), array)
            self._wait(0)
        elif kind == "gather":
            array[self._rank] = array[0]
            self._gather(self._ranks, array)
        elif self._levels:
            host, position = self._levels
            parts = self._scatter(host, array)
            self._sum(position, parts[host.index(self._rank)])
            self._gather(host, parts)
        else:
            self._sum(self._ranks, array)

    def _sum(self, ranks: Sequence[int], array: np.ndarray) -> None:
        others = len(ranks) - 1
        if others > 1 and others * array.nbytes > SMALL_BYTES:
            self._gather(ranks, self._scatter(ranks, array))
        else:
            self._added(ranks, [array] * len(ranks))

    def _scatter(self, ranks: Sequence[int], array: np.ndarray) -> list[np.ndarray]:
        """Sums this rank's part of the arrays of some ranks; returns the parts of all."""
        parts = np.array_split(array, len(ranks))
        self._added(ranks, parts)
        return parts

    def _gather(self, ranks: Sequence[int], parts: Arrays) -> None:
        """Sends this rank's part to the others, and receives theirs."""
        self._swap(ranks, [parts[ranks.index(self._rank)]] * len(ranks), parts)
        self._wait(0)

    def _added(self, ranks: Sequence[int], sent: Arrays) -> None:
        """Sends an array to each of some ranks, and adds those from them to this rank's own."""
        me = ranks.index(self._rank)
        count = max(BLOCK_BYTES // len(ranks) // sent[me].itemsize, 1)

        def add(own: np.ndarray, received: Arrays) -> None:
            total, *more = *received[:me], own, *received[me + 1 :]
            with np.errstate(all="ignore"):  # a sum may be infinite
                for summand in more[:-1]:
                    total = np.add(total, summand, out=received[0])
                np.add(total, more[-1], out=own)

        arriving: tuple[np.ndarray, Arrays] | None = None
        for number, begin in enumerate(range(0, max(map(len, sent)), count)):
            blocks = [x[begin : begin + count] for x in sent]
            own = blocks[me]
            room = self._rooms[number % 2].view(own.dtype)
            received = room[: len(ranks) * len(own)].reshape(len(ranks), len(own))
            self._swap(ranks, blocks, received)
            if arriving:
                self._wait(1)
                add(*arriving)
            arriving = own, received
        self._wait(0)
        if arriving:
            add(*arriving)

    def _swap(self, ranks: Sequence[int], sent: Arrays, received: Arrays) -> None:
        """Begins to send an array to each of some ranks, and to receive one from each.

        In each round a rank sends a piece to one rank and receives a piece from another one. A
        switch would drop packets if many hosts sent to one at once. Small arrays travel in all
        rounds at once, and between two ranks each array is one piece.
        """
        me = ranks.index(self._rank)
        small = sum(x.nbytes for x in sent) <= SMALL_BYTES
        outgoing = [x.view(np.uint8) for x in sent]
        incoming = [x.view(np.uint8) for x in received]
        longest = max(map(len, outgoing + incoming))
        step = PIECE_BYTES if len(ranks) > 2 else max(longest, 1)
        for begin in range(0, longest, step):
            piece = slice(begin, begin + step)
            for distance in range(1, len(ranks)):
                to, source = (me + distance) % len(ranks), me - distance
                self._outgoing.append((self._peers[ranks[to]], outgoing[to][piece].data))
                self._incoming.append((self._peers[ranks[source]], incoming[source][piece].data))
                if not small:
                    self._wait(1)

    def _wait(self, rounds: int) -> None:
        """Moves bytes until at most so many rounds are unfinished."""
        while max(len(self._outgoing), len(self._incoming)) > rounds:
            sent = _move(self._outgoing, socket.socket.send)
            if _move(self._incoming, socket.socket.recv_into) or sent:
                continue
            poll = select.poll()
            events = defaultdict[socket.socket, int](int)
            for queue, event in ((self._outgoing, select.POLLOUT), (self._incoming, select.POLLIN)):
                if queue:
                    events[queue[0][0].connection] |= event
            for connection, event in events.items():
                poll.register(connection, event)
            poll.poll()


class _Peer(NamedTuple):
    """Another rank."""

    connection: socket.socket
    name: int
    """Its number in the job."""


def _move(
    arrays: deque[tuple[_Peer, memoryview]], step: Callable[[socket.socket, memoryview], int]
) -> bool:
    """Moves the bytes that can move at once, array by array; returns False if there are none."""
    moved = False
    while arrays:
        peer, array = arrays[0]
        try:
            count = step(peer.connection, array) if array.nbytes else 0
            if array.nbytes and not count:
                raise ConnectionResetError
        except BlockingIOError:
            return moved
        except OSError as error:
            raise ConnectionError(
                f"rank {peer.name} has closed its connection over Gloo: it has ended, or has left "
                "the group"
            ) from error
        arrays[0] = peer, array[count:]
        if count == array.nbytes:
            arrays.popleft()
        moved = True
    return moved
