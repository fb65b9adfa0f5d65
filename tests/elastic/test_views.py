"""Members agree on one next view, in whatever order their messages arrive."""

from collections import deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fddp.elastic.views import Agreement, Member, NoQuorum, View


def members(count: int, first: int = 0) -> tuple[Member, ...]:
    return tuple(Member(k, f"m{k}", f"host:{1000 + k}") for k in range(first, first + count))


def test_a_lost_or_waiting_member_breaks_a_step_off_and_one_that_joins_does_not():
    one, other = (Agreement(f"m{k}", View(1, members(2)), 3) for k in range(2))
    one.admit(Member(2, "m2", "host:1002"))
    other.hear("m0", one.opinion)
    assert one.under_way and other.under_way and not other.breaks_off
    one.get_ready()
    other.hear("m0", one.opinion)
    assert other.breaks_off and not one.breaks_off
    other.lose("m0", ended=True)
    assert other.breaks_off


class Message(NamedTuple):
    sender: str
    receiver: str
    kind: str
    content: Any


class Network:
    """Members as state machines, and the messages between them, in order on each connection."""

    def __init__(self, count: int, most: int) -> None:
        view = View(1, members(count))
        self.most = most
        self.agreements = {x.uid: Agreement(x.uid, view, most) for x in view.members}
        self.ended = set[str]()
        self.gave_up = set[str]()
        self.excluded = set[str]()
        self.adopted: dict[str, list[View]] = {uid: [view] for uid in self.agreements}
        self.queues: dict[tuple[str, str], deque[Message]] = {}
        self.joined = dict[str, Member]()

    def send(self, sender: str, receiver: str, kind: str, content: Any) -> None:
        if sender != receiver:
            queue = self.queues.setdefault((sender, receiver), deque())
            queue.append(Message(sender, receiver, kind, content))

    def alive(self) -> list[str]:
        return [x for x in self.agreements if x not in self.ended | self.gave_up | self.excluded]

    def tell(self, uid: str) -> None:
        agreement = self.agreements[uid]
        agreement.get_ready()  # its script leaves the step at once
        for other in agreement.remaining:
            self.send(uid, other.uid, "opinion", agreement.opinion)
        self.try_next(uid)

    def lose(self, uid: str, lost: str, *, ended: bool) -> None:
        if uid in self.alive() and self.agreements[uid].lose(lost, ended=ended):
            self.tell(uid)

    def end(self, uid: str) -> None:
        """The process dies: messages on their way arrive, and then its end is noticed."""
        self.ended.add(uid)
        for other in self.agreements:
            self.send(uid, other, "end", None)

    def join(self, uid: str, member: Member) -> None:
        if uid in self.alive():
            self.joined[member.uid] = member
            if self.agreements[uid].admit(member):
                self.tell(uid)

    def try_next(self, uid: str) -> None:
        agreement = self.agreements[uid]
        try:
            view = agreement.next_view()
        except NoQuorum:
            self.gave_up.add(uid)
            return
        if view and agreement.leads():
            for member in view.members:
                self.send(uid, member.uid, "view", view)
            self.adopt(uid, view)

    def adopt(self, uid: str, view: View) -> None:
        before = self.agreements.get(uid)
        self.agreements[uid] = Agreement(uid, view, self.most)
        self.adopted.setdefault(uid, []).append(view)
        left_out = set(before.view.members if before else ()) - set(view.members)
        for member in left_out:
            self.send(uid, member.uid, "excluded", None)
        for member in view.members:
            if member.uid in self.ended and not self.queues.get((member.uid, uid)):
                self.lose(uid, member.uid, ended=True)

    def deliver(self, message: Message) -> None:
        receiver, sender = message.receiver, message.sender
        if receiver in self.ended | self.gave_up | self.excluded:
            return
        agreement = self.agreements.get(receiver)
        if message.kind == "view":
            assert isinstance(message.content, View)
            if agreement is None or agreement.accepts(sender, message.content):
                self.adopt(receiver, message.content)
        elif agreement is None:
            return
        elif message.kind == "end":
            self.lose(receiver, sender, ended=True)
        elif message.kind == "excluded":
            self.excluded.add(receiver)
        else:
            opinion = message.content
            if opinion.epoch == agreement.view.epoch and receiver in opinion.gone:
                self.excluded.add(receiver)
                return
            if opinion.epoch < agreement.view.epoch:
                self.send(receiver, sender, "view", agreement.view)
            if agreement.hear(sender, opinion):
                self.tell(receiver)
            else:
                self.try_next(receiver)

    def pending(self) -> list[tuple[str, str]]:
        return sorted(key for key, queue in self.queues.items() if queue)


def complete_views(network: Network) -> list[View]:
    """The views that all of their members have adopted: only these can train."""
    views = {view for history in network.adopted.values() for view in history}
    return sorted(
        view
        for view in views
        if all(view in network.adopted.get(member.uid, []) for member in view.members)
    )


def run(network: Network, data: st.DataObject) -> None:
    """Delivers all messages in any order that keeps the order of each connection."""
    while pending := network.pending():
        key = data.draw(st.sampled_from(pending))
        network.deliver(network.queues[key].popleft())


EVENTS = st.lists(
    st.tuples(st.sampled_from(["end", "silent", "join"]), st.integers(0, 5), st.integers(0, 5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5), EVENTS, st.data())
def test_no_two_views_of_one_epoch_can_train(count: int, events: list, data: st.DataObject):
    network = Network(count, most=6)
    uids = list(network.agreements)
    for number, (kind, first, second) in enumerate(events):
        a, b = uids[first % count], uids[second % count]
        if kind == "end" and a not in network.ended:
            network.end(a)
        elif kind == "silent" and a != b:
            network.lose(a, b, ended=False)
        elif kind == "join":
            network.join(a, members(1, 10 + number)[0])
        if network.pending() and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(network.pending()))
            network.deliver(network.queues[key].popleft())
    run(network, data)
    views = complete_views(network)
    assert len({view.epoch for view in views}) == len(views)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 5), st.sets(st.integers(0, 4), max_size=3), st.booleans(), st.data())
def test_the_members_that_remain_and_one_that_joins_train_together(
    count: int, dead: set[int], joins: bool, data: st.DataObject
):
    network = Network(count, most=6)
    dead = {k for k in dead if k < count - 1}
    if joins:
        network.join(f"m{count - 1}", members(1, 10)[0])
    for k in sorted(dead):
        network.end(f"m{k}")
    run(network, data)
    expected = {f"m{k}" for k in range(count) if k not in dead} | ({"m10"} if joins else set())
    last = complete_views(network)[-1]
    assert {member.uid for member in last.members} == expected
    assert list(last.members) == sorted(last.members)


@pytest.mark.parametrize(
    "split, goes_on",
    [
        (({0, 1, 2}, {3, 4}), {0, 1, 2}),
        (({0, 1}, {2, 3, 4}), {2, 3, 4}),
        (({0}, {1}, {2}), set()),
        (({0, 3}, {1, 2}), {0, 3}),
    ],
)
def test_of_a_split_job_the_larger_side_goes_on(split, goes_on: set[int]):
    count = sum(map(len, split))
    view = View(1, members(count))
    for side in split:
        agreements = {k: Agreement(f"m{k}", view, count) for k in side}
        for agreement in agreements.values():
            for k in set(range(count)) - side:
                agreement.lose(f"m{k}", ended=False)
            agreement.get_ready()
        for k, agreement in agreements.items():
            for other in side - {k}:
                agreement.hear(f"m{other}", agreements[other].opinion)
        for agreement in agreements.values():
            if side == goes_on:
                following = agreement.next_view()
                assert following is not None
                assert {member.order for member in following.members} == side
            else:
                with pytest.raises(NoQuorum, match="this side of the split job ends"):
                    agreement.next_view()


def test_a_single_member_goes_on_if_the_other_one_has_ended():
    alone = Agreement("m0", View(1, members(2)), 2)
    alone.lose("m1", ended=True)
    alone.get_ready()
    assert alone.next_view() == View(2, members(1))


def test_a_process_that_asks_to_join_a_full_job_is_not_admitted():
    full = Agreement("m0", View(1, members(2)), most=2)
    assert not full.admit(members(1, 10)[0])
    full.lose("m1", ended=True)
    assert full.admit(members(1, 10)[0])
