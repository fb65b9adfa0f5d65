"""Python's own objects, sent from rank to rank."""

import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

from on_ranks.claims import claim, error_of

import fddp


@dataclass
class Found:
    """An object of a user's class."""

    rank: int
    words: list[str]


class Unreadable:
    """An object that rank 0 cannot read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _not_on_rank_0, ()


def _not_on_rank_0() -> None:
    if fddp.init().rank == 0:
        raise RuntimeError("rank 0 has no such class")


@claim()
def objects_of_any_size_are_gathered_in_order_of_rank(group: fddp.Group):
    local = Found(group.rank, ["word"] * 1000 * group.rank)
    assert group.all_gather_object(local) == [
        Found(r, ["word"] * 1000 * r) for r in range(group.size)
    ]
    assert group.all_gather_object(None) == [None] * group.size


@claim()
def every_rank_gets_the_roots_object(group: fddp.Group):
    for root in (0, group.size - 1):
        local = Found(group.rank, ["word"] * 1000) if group.rank == root else None
        assert group.broadcast_object(local, root) == Found(root, ["word"] * 1000)


@claim()
def objects_stay_inside_a_subgroup(group: fddp.Group):
    backwards = group.subgroup(range(group.size)[::-1])
    assert backwards.all_gather_object(str(group.rank)) == [str(r) for r in range(group.size)][::-1]
    assert backwards.broadcast_object(group.rank) == group.size - 1


@claim()
def an_object_that_one_rank_cannot_pickle_is_an_error_on_every_rank(group: fddp.Group):
    last = group.size - 1
    local = (lambda: None) if group.rank == last else 1
    for call in (group.all_gather_object, lambda x: group.broadcast_object(x, root=last)):
        message = error_of(lambda call=call: call(local), TypeError)
        assert (
            f"rank {last}: TypeError: group." in message
            and "this function cannot be pickled" in message
        ), message
    assert "this function cannot be pickled" in error_of(
        lambda: group.all_gather_object(lambda: None), TypeError
    )
    assert group.all_gather_object(group.rank) == list(range(group.size))


@claim()
def an_object_that_one_rank_cannot_read_is_an_error_on_every_rank(group: fddp.Group):
    message = error_of(lambda: group.broadcast_object(Unreadable(), root=group.size - 1))
    assert (
        f"cannot read the object of rank {group.size - 1}: rank 0 has no such class" in message
    ), message
    assert group.broadcast_object("on") == "on"


@claim()
def an_object_that_is_signed_with_another_secret_is_not_read(group: fddp.Group):
    variables = {"FDDP_SECRET": "a guess"} if group.rank == group.size - 1 else {}
    with mock.patch.dict(os.environ, variables):
        message = error_of(lambda: group.broadcast_object(Found(0, []), root=0))
    assert (
        "rank 0 signed its object with another secret: give all ranks the same FDDP_SECRET"
        in message
    ), message
    assert group.broadcast_object("on") == "on"


@claim()
def a_root_that_is_not_there_or_not_the_others_is_an_error_on_every_rank(group: fddp.Group):
    assert "root must be a rank in" in error_of(lambda: group.broadcast_object(1, root=group.size))
    assert f"rank {group.rank}: root={group.rank}" in error_of(
        lambda: group.broadcast_object(1, root=group.rank)
    )
