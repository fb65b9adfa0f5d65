"""Stacked gradients that are summed round by round, in the loop over layers that makes them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from fddp.buckets.assignment import plan_of_sent
from fddp.buckets.sent_leaves import Caps, MiB, SentLeaf


def fill_rounds(
    tree: PyTree,
    loops: Mapping[int, tuple[int, int]],
    places: Mapping[int, int],
    *,
    bucket_cap_mb: Caps,
) -> dict[int, SentLeaf]:
    """Selects the stacks to sum round by round in the loop that computes them.

    These are the stacks of a loop and dtype that do not fit into a bucket. XLA sends nothing else
    while a loop with sums runs. So they are summed after the loop if at least as many bytes of
    other gradients are ready before it, and could be sent meanwhile.

    `loops` maps the index of a leaf to the place of its loop in the program and the number of
    rounds, `places` to the place of the last equation of its gradient.
    """
    leaves = plan_of_sent(tree, ()).leaves
    bytes_of = Counter[tuple[Any, int]]()  # of a dtype and loop
    for i, (place, length) in loops.items():
        if leaves[i].shape[0] == length:
            bytes_of[leaves[i].dtype, place] += leaves[i].nbytes
    cap = bucket_cap_mb[-1] if isinstance(bucket_cap_mb, Sequence) else bucket_cap_mb
    stacks = {
        i: (place, length)
        for i, (place, length) in loops.items()
        if leaves[i].shape[0] == length > 1 and bytes_of[leaves[i].dtype, place] > cap * MiB
    }

    def worth(loop: int) -> bool:
        before = sum(
            leaves[i].nbytes for i, place in places.items() if place < loop and i not in stacks
        )
        return before < sum(leaves[i].nbytes for i, (place, _) in stacks.items() if place == loop)

    return {i: SentLeaf(i, *loop) for i, loop in stacks.items() if worth(loop[0])}
