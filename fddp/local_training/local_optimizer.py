"""The optimizer of local steps: replicas train separately, and synchronize periodically.

The mean of shared − local parameters over replicas is a pseudo-gradient for the outer optimizer.
One formula has many names: local SGD (outer `sgd(1.0)`, which yields the mean of the parameters),
SlowMo (with momentum), DiLoCo (`sgd(0.7, momentum=0.9, nesterov=True)`), Lookahead (one replica).

Source: Stich, "Local SGD Converges Fast and Communicates Little" (2019); Lin et al., "Don't Use
Large Mini-Batches, Use Local SGD" (2020); Wang et al., "SlowMo" (2020); Douillard et al., "DiLoCo"
(2023) and "Streaming DiLoCo" (2025); see also `periods.py`.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from fddp.comm import Group, Level, islands_in_nodes
from fddp.local_training.periods import NODE, PARAMS
from fddp.optim import check_needs
from fddp.step import LocalState, StepOptimizer
from fddp.wording import check_whole


@dataclass(frozen=True, repr=False)
class LocalSteps(StepOptimizer):
    """An optimizer of islands that train separately; a subclass brings the way of its steps."""

    outer: optax.GradientTransformation
    """Updates the shared parameters with pseudo-gradients."""
    every: int | Callable[[int], int]
    """Period of the parameters, over all islands."""
    start: int
    fragments: int
    delay: int
    mix: float
    others: tuple[tuple[str, int], ...] = ()
    """(name, period) of each further mean; their numbers follow those of the fragments."""
    island: int | Literal["node"] = 1

    def __repr__(self) -> str:
        """Shows a function by its name, so that the text is equal on all ranks."""
        every: Any = self.every
        if callable(every):
            every = getattr(every, "__name__", type(every).__name__)
        if self.others:
            every = {PARAMS: every, **dict(self.others)}
        return (
            f"LocalSteps(every={every}, start={self.start}, fragments={self.fragments}, "
            f"delay={self.delay}, mix={self.mix}, island={self.island})"
        )

    def init(self, params: PyTree) -> Any:
        """Initializes both optimizers."""
        weight = jnp.zeros(self.fragments + len(self.others))
        return LocalState(params, self.outer.init(params), self.inner.init(params), weight)

    def update(self, *args: Any, **extra: Any) -> Any:
        """Raises TypeError: only a step can train replicas separately and synchronize them."""
        raise TypeError(
            "fddp.local_steps cannot be a part of another optimizer: give train_step "
            "local_steps(optimizer, …) itself, with chains, scales and other wrappers inside of it."
        )

    def check_needs(self, params: PyTree = None) -> None:
        """Raises TypeError if one of both optimizers requires arguments that a step lacks."""
        super().check_needs(params)
        check_needs(self.outer, params)

    def on(self, group: Group) -> tuple[StepOptimizer, Group]:
        """Makes each island a node of the group, or subdivides nodes into islands; collective.

        Islands of one replica leave the nodes unchanged. It raises ValueError if islands do not
        divide the nodes, or the group needs nodes and has none.
        """
        return self, self._in_islands(group)

    def _in_islands(self, group: Group) -> Group:
        if group.nodes is None:
            if self.island == "node":
                raise ValueError(
                    "local_steps: island='node' needs a group with nodes: give the step "
                    "group.hierarchical()."
                )
            if self.node is not None:
                raise ValueError(
                    "local_steps: every has a period of 'node', which needs a group with nodes: "
                    "give the step group.hierarchical()."
                )
            return group if self.island == 1 else group.hierarchical(self.island)
        size = len(group.nodes[0]) if self.island == "node" else self.island
        if len(group.nodes[0]) % size:
            raise ValueError(
                f"local_steps: island={size}, and the nodes of this group have {group.local} "
                "replicas: give island='node', a divisor of their number, or the plain group."
            )
        if size in (1, group.local) and self.node is None:
            return group
        return islands_in_nodes(group, size)

    def divided_like(self, template: Group, group: Group) -> Group:
        """Divides a group into nodes and islands as in `template`; a group with nodes keeps them.

        Collective.
        """
        size = template.local
        if self.node is not None:
            size = self.replicas(template.parts) * template.communicator.at("neighbours").size
        if size is not None and not group.nodes:
            group = group.hierarchical(size)
        return self._in_islands(group)

    def replicas(self, per_node: int) -> int:
        """Number of replicas per island, in a group whose nodes are the islands."""
        return 1 if self.island == 1 else per_node

    def level(self, per_node: int) -> Level:
        """Returns the replicas that average: those at one position in all islands."""
        return "all" if self.replicas(per_node) == 1 else "network"

    def sends(self, number: int) -> tuple[int, ...]:
        """Lists the exchanges of step `number`, counted from 1: further means, then a fragment."""
        # Number of local steps before the exchange.
        local_step = number - self.start - self.delay
        if local_step <= 0:
            return ()
        means = enumerate(self.others, start=self.fragments)
        due = [k for k, (_, period) in means if local_step % period == 0]
        fragment = self._due_fragment(local_step)
        if fragment is None:
            return tuple(due)
        # A mean of all parameters over all islands includes the mean over each node.
        if self.fragments == 1 and self.node in due:
            due.remove(self.node)
        return (*due, fragment)

    def _due_fragment(self, local_step: int) -> int | None:
        if callable(self.every):
            ends = self._synchronizations
            while ends[-1] < local_step:
                period = self.every(self.start + ends[-1])
                ends.append(ends[-1] + check_whole("every(step)", period, 1 + self.delay))
            return 0 if ends[bisect_left(ends, local_step)] == local_step else None
        for fragment in range(self.fragments):
            if local_step % self.every == fragment * self.every // self.fragments:
                return fragment
        return None

    @cached_property
    def _synchronizations(self) -> list[int]:
        """Numbers of local steps at the synchronizations so far, if `every` is a function."""
        return [0]

    @property
    def node(self) -> int | None:
        """Number of the mean over the islands of a node; None without it."""
        for number, (name, _) in enumerate(self.others, start=self.fragments):
            if name == NODE:
                return number
        return None
