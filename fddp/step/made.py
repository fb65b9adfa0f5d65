"""A first state whose arrays are made by a function, for a model that no replica can hold.

The function is traced for the form of what it makes, and compared on all ranks. Then it is run leaf by leaf: each
replica makes a whole leaf, with the bits that the function alone would give it, keeps its part of the leaf and of what
the optimizer has for it, and drops the leaf before it makes the next. Nothing is sent.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from fddp.buckets import join
from fddp.comm import REPLICATED, Placement, specs, trace
from fddp.jax_internals import ClosedJaxpr, form_of_program, jaxpr_as_fun
from fddp.jaxpr import Piece, each_alone, inputs_of_outputs, pieces, run_seeds, seeded, text_digest
from fddp.optim import Optimizer
from fddp.step.checks import check_arrays
from fddp.step.held import first_held, with_held
from fddp.step.replica import Replica
from fddp.step.state import TrainState
from fddp.step.way import Held

# (part of a program, values by number, specs of what it makes) → what it makes, on all replicas
Run: TypeAlias = Callable[[Piece, Mapping[int, Any], Sequence[Any]], Sequence[Any]]


def made_state(replica: Replica, optimizer: Optimizer, program: ClosedJaxpr, state: TrainState) -> TrainState:
    """The first state, with leaves that the replicas make.

    Args:
      replica: what one replica does.
      optimizer: of the step.
      program: makes the parameters and buffers in place of which there are forms.
      state: with these forms, and without an optimizer's state.

    Returns:
      The state, as replicas hold it.
    """
    placement = replica.group.placement
    leaves, tree = jax.tree.flatten((state.params, state.model_state))
    where = specs(placement, replica.trained(state.params))

    def hold(*leaves: Any) -> tuple[Any, Any]:
        return first_held(replica, optimizer, where, *tree.unflatten(leaves))

    def with_leaves(leaves: Iterable[Any], held: Held) -> TrainState:
        params, model_state = tree.unflatten(leaves)
        return with_held(state._replace(params=params, model_state=model_state), held)

    holding, forms = trace(placement, hold, *leaves)
    equal, own = forms
    outputs = [REPLICATED] * len(jax.tree.leaves(equal)) + [placement.per_replica] * len(own)
    run = _runner(placement)
    here = {number: x for number, x in enumerate(leaves) if not is_form(x)}
    # The leaves that replicas hold whole.
    stay = {x for x in jax.tree.leaves(with_leaves(range(len(leaves)), join(*forms))) if isinstance(x, int)}
    to_make = [number for number, x in enumerate(leaves) if is_form(x)]
    held = dict[int, Any]()
    # What is made of no leaf, an optimizer's zeros say, comes last: it fills the memory that leaves have left.
    waiting = _by_inputs(holding)
    for some in chain(_made(placement, program, run), [{}]):
        here |= {to_make[number]: x for number, x in some.items()}
        ready = [bool(piece.reads or not some) and here.keys() >= set(piece.reads) for piece in waiting]
        some.clear()  # nobody else keeps them
        for piece in compress(waiting, ready):
            held.update(zip(piece.makes, run(piece, here, [outputs[number] for number in piece.makes])))
        waiting = [piece for piece, done in zip(waiting, ready) if not done]
        wanted = stay.union(*(piece.reads for piece in waiting))
        here = {number: x for number, x in here.items() if number in wanted}
    parts = jax.tree.unflatten(jax.tree.structure(forms), [held[number] for number in range(len(outputs))])
    return with_leaves([here.get(number, form) for number, form in enumerate(leaves)], join(*parts))


def read_functions(params: Any, model_state: Any) -> tuple[Any, Any, ClosedJaxpr | None]:
    """Traces the functions that make parameters or buffers; nothing is computed.

    Args:
      params: a tree of arrays, or a function without arguments that makes one.
      model_state: likewise, or None.

    Returns:
      Both, with forms in place of what functions make; and the program, without inputs, that makes it, leaf after leaf.
      None: there are no functions.

    Raises:
      TypeError: a function wants arguments, makes something else than arrays, or cannot be traced.
    """
    given = {"params": params, "model_state": model_state}
    functions = {name: make for name, make in given.items() if _is_function(make)}
    if not functions:
        return params, model_state, None
    for name, make in functions.items():
        _check_arguments(name, make)

    def make() -> list[Any]:
        return [_as_given(name, make()) for name, make in functions.items()]

    try:
        program, forms = jax.make_jaxpr(make, return_shape=True)()
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"step.init: the function given for {' and '.join(functions)} is traced, so that each leaf can be made by "
            "itself, and it needs numbers while it is: compute with jax.numpy and jax.random in it, or call it and "
            f"give the arrays. JAX says: {str(error).splitlines()[0]}"
        ) from error
    given |= dict(zip(functions, forms))
    return given["params"], given["model_state"], program


def described_program(program: ClosedJaxpr) -> list[str]:
    """Lines that are equal on all ranks if a program makes the same on all; values that it does not need do not count.

    Args:
      program: makes parameters.

    Returns:
      The lines.
    """
    (needed,) = pieces(program, [range(len(program.jaxpr.outvars))])
    closed = needed.program
    digests = [text_digest(closed)[:16], *map(_digest, closed.consts)]
    return [f"made by a function of digest {'-'.join(digests)} (does its key depend on the rank, or on the time?)"]


def is_form(x: Any) -> bool:
    """Whether it is the form of an array, and no array."""
    return isinstance(x, jax.ShapeDtypeStruct)


def _made(placement: Placement, program: ClosedJaxpr, run: Run) -> Iterator[dict[int, Any]]:
    """The outputs of a program without inputs, by number: one by one, or all at once if that is much less work."""
    seeds, rest = seeded(program)
    drawn = dict(enumerate(placement.place(run_seeds(seeds), REPLICATED)))
    for piece in each_alone(rest):
        yield dict(zip(piece.makes, run(piece, drawn, [REPLICATED] * len(piece.makes))))


def _by_inputs(program: ClosedJaxpr) -> list[Piece]:
    """The parts of a program, one for each set of inputs that outputs come from, or for an output that needs none."""
    groups: dict[Any, list[int]] = {}
    for output, inputs in enumerate(inputs_of_outputs(program)):
        groups.setdefault(inputs or output, []).append(output)
    return pieces(program, list(groups.values()))


def _runner(placement: Placement) -> Run:
    """Makes a function that runs parts of programs on all replicas, and compiles equal ones once."""
    known = dict[Any, tuple[ClosedJaxpr, Callable[..., Any]]]()

    def run(piece: Piece, values: Mapping[int, Any], outputs: Sequence[Any]) -> Sequence[Any]:
        form = form_of_program(piece.program), *outputs
        if form not in known:
            inputs = (REPLICATED,) * len(piece.reads)
            # The program is kept: its form counts as long as it lives.
            known[form] = piece.program, placement.program(jaxpr_as_fun(piece.program), inputs, list(outputs))
        _, program = known[form]
        # Awaited: with several of them under way several leaves would be whole.
        return jax.block_until_ready(program(*(values[number] for number in piece.reads)))

    return run


def _is_function(x: Any) -> bool:
    """Whether it is to be called for arrays. A module that is a pytree can be called, too, and is a tree of arrays."""
    return callable(x) and jax.tree_util.all_leaves([x])


def _check_arguments(name: str, make: Callable[..., Any]) -> None:
    """Says that a function wants arguments."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # it does not tell
        return
    try:
        signature.bind()
    except TypeError:
        raise TypeError(
            f"step.init: a function that is given for {name} is called without arguments, and {make!r} wants "
            f"{signature}: give functools.partial(make, ...), or a lambda."
        ) from None


def _as_given(name: str, made: Any) -> Any:
    """Makes of a function's result what a step is given: arrays in memory of their own, of dtypes that are for sure."""
    if name == "params":
        check_arrays(made)

    def array(x: Any) -> Any:
        x = jnp.copy(x)
        return jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x

    return jax.tree.map(array, made)


def _digest(x: Any) -> str:
    """A hash of an array's bits."""
    words = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return hashlib.sha256(np.asarray(words).tobytes()).hexdigest()[:16]
