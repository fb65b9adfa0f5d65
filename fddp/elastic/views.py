"""The agreement of a job's members on its next view: a state machine without input and output.

A view is the set of ranks that train together. When a member ends or falls silent, or a process
requests entry, the others report their opinions to each other until all that remain hold the same
one. The first of them then announces the next view. Every step of this is a merge of sets, so the
order of messages does not matter.

No two views of one epoch go on: a view needs the opinions of all its members, and more than half of
the previous view's members, or half of them with the first one. Members whose process is known to
have ended do not count.

Source: view-synchronous membership, Birman and Joseph, "Exploiting Virtual Synchrony in Distributed
Systems" (1987).
"""

from collections.abc import Mapping
from typing import NamedTuple


class Member(NamedTuple):
    """A process of the job."""

    order: int
    """Its rank in the launcher's numbering; ranks of a view are in this order."""
    uid: str
    """Unique: a restarted process is another member."""
    address: str
    """host:port at which it listens to the other members."""


class View(NamedTuple):
    """The members that train together."""

    epoch: int
    members: tuple[Member, ...]
    service: str = ""
    """host:port at which they meet, once the view is announced."""

    def has(self, uid: str) -> bool:
        return any(member.uid == uid for member in self.members)


OUTSIDE = View(-1, ())
"""The view of a process that is no member yet."""


class Opinion(NamedTuple):
    """A member's knowledge of the next view."""

    epoch: int
    """Of the current view."""
    gone: Mapping[str, bool]
    """uid of a member that does not remain → True if its process has ended."""
    joining: frozenset[Member] = frozenset()
    ready: bool = False
    """True if the member has left its step, and waits for the next view."""

    def merged(self, other: "Opinion") -> "Opinion":
        """Adds the knowledge of another member of the same view."""
        gone = {uid: self.gone.get(uid, False) or ended for uid, ended in other.gone.items()}
        return self._replace(gone={**self.gone, **gone}, joining=self.joining | other.joining)


class Excluded(RuntimeError):
    """The other members go on without this one."""


class NoQuorum(RuntimeError):
    """Too few members of the previous view remain for a next one."""


class Agreement:
    """One member's part in the agreement on the view that follows `view`."""

    def __init__(self, uid: str, view: View, most: int, least: int = 1) -> None:
        """`most` limits the members of a view, `least` those of the next one."""
        self.view = view
        self.opinion = Opinion(view.epoch, {})
        self._uid = uid
        self._most = most
        self._least = least
        self._opinions = dict[str, Opinion]()

    @property
    def remaining(self) -> tuple[Member, ...]:
        return tuple(x for x in self.view.members if x.uid not in self.opinion.gone)

    @property
    def under_way(self) -> bool:
        """True if there is a reason for a next view."""
        return not self.view.epoch or bool(self.opinion.gone) or bool(self.opinion.joining)

    @property
    def breaks_off(self) -> bool:
        """True if a step waits in vain for a member, which is gone or waits for the next view."""
        # A process that joins breaks off nothing: members may be in a collective of their scripts.
        return bool(self.opinion.gone) or any(x and x.ready for x in self._others().values())

    def lose(self, uid: str, *, ended: bool) -> bool:
        """Records the loss of a member: it has ended, is silent or stuck. True for a new loss."""
        if not self.view.has(uid):
            return False
        return self._learn(Opinion(self.view.epoch, {uid: ended}))

    def admit(self, member: Member) -> bool:
        """Records a process that requests entry. True for a new one, if there is room."""
        if (
            self.view == OUTSIDE
            or len({*self.remaining, *self.opinion.joining, member}) > self._most
        ):
            return False
        return self._learn(Opinion(self.view.epoch, {}, frozenset({member})))

    def get_ready(self) -> None:
        """Records that this member has left its step."""
        self.opinion = self.opinion._replace(ready=True)

    def hear(self, uid: str, opinion: Opinion) -> bool:
        """Merges a member's opinion; True if this member's opinion has changed."""
        if opinion.epoch != self.view.epoch or uid in self.opinion.gone:
            return False
        self._opinions[uid] = opinion
        return self._learn(opinion)

    def accepts(self, uid: str, view: View) -> bool:
        """True if this member takes over a view that a member announces or passes on."""
        if self.view == OUTSIDE:
            return view.has(self._uid)
        # A member that is gone in this member's opinion may have announced it in vain.
        remains = uid in [member.uid for member in self.remaining]
        following = view.epoch == self.view.epoch + 1
        return remains and following and view.has(self._uid)

    def next_view(self) -> View | None:
        """Returns the next view, once all that remain agree on it; NoQuorum if they are too few."""
        agree = self.opinion.ready and all(x == self.opinion for x in self._others().values())
        members = {*self.remaining, *self.opinion.joining}
        if not (self.under_way and agree) or len(members) < self._least:
            return None
        self._check_quorum()
        return View(self.view.epoch + 1, tuple(sorted(members)))

    def late(self) -> list[str]:
        """The other members that remain and are not ready."""
        return [uid for uid, opinion in self._others().items() if not (opinion and opinion.ready)]

    def leads(self) -> bool:
        """True if this member announces the next view."""
        return self.remaining[:1] != () and self.remaining[0].uid == self._uid

    def _others(self) -> dict[str, Opinion | None]:
        """uid of each other member that remains → its opinion, None before the first."""
        return {x.uid: self._opinions.get(x.uid) for x in self.remaining if x.uid != self._uid}

    def _learn(self, other: Opinion) -> bool:
        before = self.opinion
        self.opinion = before.merged(other)
        return self.opinion != before

    def _check_quorum(self) -> None:
        remaining = len(self.remaining)
        voters = len(self.view.members) - sum(self.opinion.gone.values())
        first = self.view.members[0] in self.remaining
        if 2 * remaining > voters or (2 * remaining == voters and first):
            return
        lost = [k for k, x in enumerate(self.view.members) if self.opinion.gone.get(x.uid) is False]
        raise NoQuorum(
            f"only {remaining} of {voters} ranks reach each other, and ranks {lost} may train on "
            "elsewhere: this side of the split job ends. The side with more than half of the ranks "
            "goes on, or the half with the first rank."
        )
