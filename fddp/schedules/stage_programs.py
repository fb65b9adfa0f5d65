"""A cut program, compiled: each stage is an XLA program of its own that hands values on to later ones."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from fddp.buckets import sub_byte
from fddp.comm import Placement
from fddp.jax_internals import ClosedJaxpr, Jaxpr, callbacks, inner_programs, make_program
from fddp.jaxpr import Stage, cut


@dataclass(frozen=True)
class Relay:
    """Stages, to be run one after the other."""

    stages: tuple[Stage, ...]
    programs: tuple[Callable[..., Sequence[jax.Array]], ...]
    groups: tuple[tuple[int, ...], ...]
    """Which of the program's outputs each stage makes."""

    def run(self, k: int, values: dict[int, Any]) -> Sequence[jax.Array]:
        """Launches stage k.

        Args:
          k: the next stage.
          values: by number, the program's inputs first; what no later stage reads is taken out, what the stage hands
            on is put in.

        Returns:
          The outputs of its group.
        """
        stage = self.stages[k]
        made = self.programs[k](*(values[number] for number in stage.reads))
        for number in stage.frees:
            del values[number]
        values.update(zip(stage.writes, made))
        return made[len(stage.writes) :]


def relay(
    placement: Placement,
    closed: ClosedJaxpr,
    groups: Sequence[Sequence[int]],
    given: Sequence[jax.ShapeDtypeStruct],
    specs: Sequence[PartitionSpec],
    out_spec: PartitionSpec,
    donate: Sequence[int] = (),
) -> Relay:
    """Cuts a program of one replica and compiles its stages.

    Args:
      placement: where the programs of the replicas run.
      closed: the program.
      groups: numbers of its outputs, for each stage.
      given: the form of each of its inputs, as all replicas together have it.
      specs: of each of its inputs.
      out_spec: of its outputs.
      donate: numbers of the inputs whose memory may be used for an output, once nothing reads them any more.

    Returns:
      The stages, ready to run.
    """
    jaxpr = closed.jaxpr
    outputs = [jaxpr.outvars[number] for group in groups for number in group]
    consts = dict(zip(jaxpr.constvars, closed.consts))
    stages = cut(make_program(closed, jaxpr.eqns, jaxpr.invars, outputs, consts), [len(group) for group in groups])
    forms, inputs = dict(enumerate(given)), len(given)

    # Beside each program the constants that it was made for: while they live no other object has their ids.
    compiled: dict[Any, tuple[Callable[..., Sequence[jax.Array]], Sequence[Any]]] = {}

    def usable(stage: Stage, group: Sequence[int]) -> list[int]:
        """Places of the inputs whose memory an output of the stage can have: none is donated that has no such place."""
        free = Counter((x.shape, x.dtype) for x in (closed.out_avals[number] for number in group))
        places = list[int]()
        for at, number in enumerate(stage.reads):
            if number in stage.frees and number in donate and specs[number] == out_spec:
                form = (closed.in_avals[number].shape, closed.in_avals[number].dtype)
                if free[form]:
                    free[form] -= 1
                    places.append(at)
        return places

    def program(stage: Stage, group: Sequence[int]) -> Callable[..., Sequence[jax.Array]]:
        def body(*values: jax.Array) -> list[jax.Array]:
            # What stages hand on is each replica's own and crosses with a first dim.
            read = [value if number < inputs else value[0] for number, value in zip(stage.reads, values)]
            made = stage.run(*read)
            handed = len(stage.writes)
            return [value[None] for value in made[:handed]] + made[handed:]

        in_specs = tuple(specs[number] if number < inputs else placement.per_replica for number in stage.reads)
        out_specs = [placement.per_replica] * len(stage.writes) + [out_spec] * len(group)
        read = [forms[number] for number in stage.reads]
        jitted = placement.program(body, in_specs, out_specs, donate=usable(stage, group))
        traced = jitted.trace(*read)
        forms.update(zip(stage.writes, traced.out_info))
        lowered = traced.lower()
        # Equal layers make equal stages: what XLA would get twice is compiled once.
        shapes = tuple((x.shape, x.dtype) for x in read)
        same = (lowered.as_text(), shapes, *map(id, traced.jaxpr.consts), *_callbacks(traced.jaxpr.jaxpr))
        if same not in compiled:
            # What is compiled ahead of time takes no arrays of less than 8 bits: JAX gives them another layout.
            made = jitted if any(sub_byte(x.dtype) for x in read) else lowered.compile()
            compiled[same] = made, traced.jaxpr.consts
        return compiled[same][0]

    programs = tuple(program(stage, group) if group else _nothing for stage, group in zip(stages, groups))
    return Relay(stages, programs, tuple(map(tuple, groups)))


def _callbacks(jaxpr: Jaxpr) -> list[Any]:
    """The host's functions that a program calls: its text only numbers them."""
    own = [callback for eqn in jaxpr.eqns for callback in callbacks(eqn)]
    bodies = [body for eqn in jaxpr.eqns for body in inner_programs(eqn)]
    return [*own, *(callback for body in bodies for callback in _callbacks(body))]


def _nothing() -> list[jax.Array]:
    """A stage without outputs; it has no equations either, as nobody needs them."""
    return []
