"""A process's membership in a job: it hears from the other members, and forms views with them.

All threads share one state under one lock: those that read the connections, one that sends signs
of life and looks for silent members, and the main thread, which waits for a next view.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fddp.comm import answer_calls, call, new_secret
from fddp.elastic.connections import CONNECT_S, RETRY_S, Connection, report_lost, write_members
from fddp.elastic.signs import BEAT_S, BETWEEN, Limits, Signs
from fddp.elastic.views import OUTSIDE, Agreement, Excluded, Member, NoQuorum, Opinion, View
from fddp.runtime import place_of

TOPIC = "members"
END_S = 5.0  # `python -m fddp run` may end a silent process by then, which then does not count


class Membership:
    """This process as a member of a job."""

    def __init__(
        self, order: int, address: tuple[str, int], limits: Limits, revoke: Callable[[], None]
    ) -> None:
        """Listens at `address`. `revoke()` breaks the messages of the current step off."""
        uid = f"{order}-{os.getpid()}-{new_secret()[:8]}"
        self._limits = limits
        self._revoke = revoke
        self._state = threading.Condition()
        self._links = dict[str, Connection]()
        self._agreement = Agreement(uid, OUTSIDE, limits.most)
        self._waiting = set[Member]()  # for room in the job
        self.signs = Signs(limits)
        self._ended = set[str]()  # processes whose connection has ended
        self._missed = set[str]()  # lost members, for which messages were broken off
        self._excluded = False
        door = socket.create_server(address, backlog=128)
        self.host = address[0]
        self.me = Member(order, uid, f"{self.host}:{door.getsockname()[1]}")
        answer_calls(door, TOPIC, uid, self._begin)
        threading.Thread(target=self._beat, name="fddp-beat", daemon=True).start()

    ### The main thread

    def connect(self, address: str) -> Connection:
        """Connects to a member, and begins to read its lines; OSError if none answers."""
        return self._begin(*call(place_of(address), TOPIC, self.me.uid, CONNECT_S))

    def found(self, size: int) -> None:
        """Becomes the first member of a new job, which begins with `size` members."""
        with self._state:
            view = View(0, (self.me,))
            self._agreement = Agreement(self.me.uid, view, self._limits.most, size)

    def next_view(self, serve: Callable[[View], str], timeout_s: float, after: int) -> View:
        """Waits for the first view after epoch `after`; the leader announces it, and serves it."""
        deadline = time.monotonic() + timeout_s
        with self._state:
            if not self._agreement.opinion.ready:
                self._agreement.get_ready()
                self._tell()
            quorum_by = float("inf")
            while True:
                if self._excluded:
                    raise Excluded(
                        "the other ranks have gone on without this one, which was silent or stuck: "
                        "end it, and start it again to join them."
                    )
                if self._agreement.view.epoch > after:
                    return self._agreement.view
                view = None
                try:
                    view = self._agreement.next_view()
                except NoQuorum:
                    quorum_by = min(quorum_by, time.monotonic() + END_S)
                    if time.monotonic() > quorum_by:
                        raise
                if view and self._agreement.leads():
                    self._announce(view, serve)
                    continue
                if self._agreement.view == OUTSIDE and not self._links:
                    raise ConnectionError  # the member with this process's request has ended
                seconds = deadline - time.monotonic()
                if seconds <= 0:
                    deadline = self._lose_late()
                self._state.wait(min(max(seconds, 0.0), 1.0))

    def regroups(self, within_s: float = 0.0) -> bool:
        """True if a next view is due; waits for its reason, for at most some seconds."""
        with self._state:
            due = lambda: self._excluded or self._agreement.under_way  # noqa: E731
            return bool(self._state.wait_for(due, within_s))

    def leave(self, timeout_s: float) -> None:
        """Waits until every member has ended its script, or is gone."""
        with self._state:
            self.signs.left[self.me.uid] = self.signs.done
            for link in self._links_of_view():
                link.send({"left": self.signs.done})
            self._state.wait_for(self._all_left, timeout_s)

    ### The other threads

    def _begin(self, uid: str, connection: socket.socket) -> Connection:
        link = Connection(uid, connection)
        with self._state:
            self._links[uid] = link
            if self._agreement.view.has(uid):
                link.send({"view": self._agreement.view})  # it may have connected too late
        threading.Thread(target=self._read, args=(link,), name="fddp-member", daemon=True).start()
        return link

    def _read(self, link: Connection) -> None:
        for words in link.lines():
            with self._state:
                self.signs.hear(link.uid)
                for name, value in words.items():
                    getattr(self, f"_hear_{name}")(link, value)
                self._state.notify_all()
        with self._state:
            if self._links.get(link.uid) is link:
                del self._links[link.uid]
                self._waiting = {x for x in self._waiting if x.uid != link.uid}
                self._ended.add(link.uid)
                if link.uid not in self.signs.left:
                    self._lose(link.uid, ended=link.ended)
                self._state.notify_all()

    def _hear_beat(self, link: Connection, value: Any) -> None:
        self.signs.place(link.uid, *value)

    def _hear_left(self, link: Connection, value: Any) -> None:
        self.signs.left[link.uid] = int(value)

    def _hear_excluded(self, link: Connection, value: Any) -> None:
        self._excluded = True
        self._revoke()

    def _hear_members(self, link: Connection, value: Any) -> None:
        """A member has answered a request to join: all members must hear it."""
        for member in value:
            self._connect_later(Member(*member))

    def _hear_join(self, link: Connection, value: Any) -> None:
        link.send({"members": self._agreement.view.members})
        self._waiting.add(Member(*value))
        self._admit_waiting()

    def _hear_opinion(self, link: Connection, value: Any) -> None:
        joining = frozenset(Member(*member) for member in value["joining"])
        opinion = Opinion(**{**value, "joining": joining})
        if self.me.uid in opinion.gone and opinion.epoch == self._agreement.view.epoch:
            self._hear_excluded(link, True)
        if opinion.epoch < self._agreement.view.epoch:
            link.send({"view": self._agreement.view})  # it has missed the announcement
        if self._agreement.hear(link.uid, opinion):
            self._changed()

    def _hear_view(self, link: Connection, value: Any) -> None:
        epoch, members, service = value
        view = View(epoch, tuple(Member(*member) for member in members), service)
        if self._agreement.accepts(link.uid, view):
            self._adopt(view)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            with self._state:
                for uid in self.signs.lost(self._other_uids()):
                    self._lose(uid, ended=uid in self.signs.left)
                self._admit_waiting()
                if self.signs.own_place[1] and self._agreement.breaks_off:
                    self._revoke()
                links = self._links_of_view()
                words = {"beat": self.signs.own_place}
            for link in links:
                link.send(words)

    ### With the lock held

    def _lose(self, uid: str, *, ended: bool) -> None:
        if self._agreement.lose(uid, ended=ended):
            if not ended:
                report_lost(uid)
            self._changed()

    def _lose_late(self) -> float:
        """Loses the members that have not left their step; returns the next deadline."""
        uids = self._agreement.late()
        if not uids or not self._agreement.view.epoch:
            raise TimeoutError("some ranks are missing")
        for uid in uids:
            self._lose(uid, ended=False)
        return time.monotonic() + BETWEEN * self._limits.stall_s

    def _admit_waiting(self) -> None:
        if self._agreement.view.epoch and not self.signs.stepped:
            return  # without a step between changes, ranks that come and go would halt the job
        admitted = [self._agreement.admit(member) for member in self._waiting]
        if any(admitted):
            self._changed()

    def _changed(self) -> None:
        """Informs the others, and breaks the messages off if a member is lost."""
        for uid in self.signs.left:  # its script has ended: it takes no part in a further view
            self._agreement.lose(uid, ended=True)
        self._admit_waiting()  # a lost member makes room
        self._tell()
        lost = self._agreement.opinion.gone.keys() - self.signs.left.keys()
        if not lost <= self._missed:
            self._missed |= lost
            self._revoke()
        self._state.notify_all()

    def _tell(self) -> None:
        opinion = self._agreement.opinion
        words = {**opinion._asdict(), "joining": sorted(opinion.joining)}
        for link in self._links_of_view():
            link.send({"opinion": words})

    def _announce(self, view: View, serve: Callable[[View], str]) -> None:
        self._state.release()  # meanwhile other threads may lose a further member
        try:
            service = serve(view)
        finally:
            self._state.acquire()
        if self._agreement.next_view() != view:
            return
        view = view._replace(service=service)
        for member in view.members:
            if link := self._links.get(member.uid):
                link.send({"view": view})
        self._adopt(view)

    def _adopt(self, view: View) -> None:
        before = self._agreement.view.members
        lost = {member.uid for member in before} - {member.uid for member in view.members}
        for uid in lost & self._links.keys():
            self._links[uid].send({"excluded": True})
            self._links[uid].finish()
        self._agreement = Agreement(self.me.uid, view, self._limits.most)
        self._waiting -= set(view.members)
        self.signs.restart()
        for member in view.members:
            if self.me not in before:
                self._connect_later(member)
            elif member.uid in self._ended:  # since it agreed, or asked to join
                self._lose(member.uid, ended=True)
        write_members(view)
        self._admit_waiting()
        self._state.notify_all()

    def _connect_later(self, member: Member) -> None:
        if member.uid == self.me.uid or member.uid in self._links:
            return

        def connect() -> None:
            end = time.monotonic() + self._limits.silence_s
            while member.uid not in self._links and time.monotonic() < end:
                with suppress(OSError):
                    self.connect(member.address)
                    return
                time.sleep(RETRY_S)

        threading.Thread(target=connect, daemon=True).start()

    def _links_of_view(self) -> list[Connection]:
        members = self._agreement.remaining
        return [self._links[member.uid] for member in members if member.uid in self._links]

    def _all_left(self) -> bool:
        return all(x in self.signs.left or x not in self._links for x in self._other_uids())

    def _other_uids(self) -> list[str]:
        return [member.uid for member in self._agreement.remaining if member != self.me]
