"""Joins groups of the same processes; buckets alternate between their communicators.

One communicator sends one bucket at a time, and one flow of messages may not fill a fast link.
Several communicators have as many buckets in flight.

Source: Li et al. (VLDB 2020), section 5.4; `_round_robin_process_groups` in `torch.distributed`.
"""

from collections.abc import Sequence
from dataclasses import replace

from fddp.comm.agreement import verify
from fddp.comm.group import Group
from fddp.wording import check_has


def round_robin(groups: Sequence[Group]) -> Group:
    """Joins groups of the same processes into one group with concurrent all-reduces.

    A step sends its sums through as many lanes as groups, in turn. Where XLA carries the messages
    (NCCL, several devices in a process), one communicator sends all. The first group carries all
    other traffic. Every process calls it.

    Args:
      groups: groups of the same processes in the same order, such as `[group] * 3`; equally many on
        every process.

    Returns:
      The group.

    Raises:
      ValueError: no group, groups of other processes or devices, or unequal numbers of groups; on
        every rank of the first group.

    Example:
      >>> import fddp
      >>> group = fddp.init()
      >>> fddp.round_robin([group, group]).size == group.size
      True
    """
    check_has("__iter__", "round_robin: groups", groups, "a sequence of groups")
    groups = list(groups)
    if not groups:
        raise ValueError("round_robin needs at least one group, got none.")
    first = groups[0]
    for group in groups:
        check_has("placement", "round_robin: each of groups", group, "a fddp.Group")
    verify(first, "groups for round_robin", lambda: _described(groups))
    return replace(first, transport=first.transport._replace(lanes=len(groups)))


def _described(groups: Sequence[Group]) -> list[str]:
    forms = [
        f"{group.size} replicas of backend {group.backend!r} on processes {[*group.global_ranks]}"
        for group in groups
    ]
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise ValueError(
                "round_robin needs groups of the same replicas in the same order: "
                f"group 0 is {forms[0]}, group {number} is {form}."
            )
    return [f"{len(groups)} groups"]
