"""Makes the first state with a function, leaf by leaf, for a model larger than one replica's
memory.

The function is traced for shapes and dtypes, and its program is compared on all ranks. Then each
replica computes one whole leaf at a time, with the bits of a plain call of the function. It takes
its shard of the leaf and of the optimizer's state, and frees the leaf before the next one. Nothing
is sent.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fddp.buckets import insert_shards
from fddp.comm import REPLICATED, Placement, specs, trace
from fddp.jax_internals import ClosedJaxpr, form_of_program, jaxpr_as_fun
from fddp.jaxpr import Piece, each_alone, inputs_of_outputs, pieces, run_seeds, seeded, text_digest
from fddp.step.checks import check_arrays
from fddp.step.held import first_held, with_held
from fddp.step.replica import Replica
from fddp.step.state import TrainState
from fddp.step.step_optimizer import Optimizer
from fddp.step.way import Held

# (part of a program, values by number, specs of its outputs) → its outputs, on all replicas
Run: TypeAlias = Callable[[Piece, Mapping[int, Any], Sequence[Any]], Sequence[Any]]


def made_state(
    replica: Replica, optimizer: Optimizer, program: ClosedJaxpr, state: TrainState
) -> TrainState:
    """Completes a first state with the leaves of `program`, and with the optimizer's state.

    Leaves of `state` that are shapes and dtypes stand for the program's outputs, in order.
    """
    placement = replica.group.placement
    leaves, tree = jax.tree.flatten((state.params, state.model_state))
    layout = specs(placement, replica.trained(state.params))

    def hold(*leaves: Any) -> tuple[Any, Any]:
        return first_held(replica, optimizer, layout, *tree.unflatten(leaves))

    def with_leaves(leaves: Iterable[Any], share: Held) -> TrainState:
        params, model_state = tree.unflatten(leaves)
        return with_held(state._replace(params=params, model_state=model_state), share)

    holding, forms = trace(placement, hold, *leaves)
    equal, local = forms
    out_specs = [REPLICATED] * len(jax.tree.leaves(equal)) + [placement.per_replica] * len(local)
    run = _runner(placement)
    arrays = {number: x for number, x in enumerate(leaves) if not is_form(x)}
    # The leaves that are whole arrays in the state.
    whole_leaves = {
        x
        for x in jax.tree.leaves(with_leaves(range(len(leaves)), insert_shards(*forms)))
        if isinstance(x, int)
    }
    missing = [number for number, x in enumerate(leaves) if is_form(x)]
    outputs = dict[int, Any]()
    # Outputs without inputs (an optimizer's zeros) come last, in memory that leaves have freed.
    waiting = _by_inputs(holding)
    for new_leaves in chain(_made(placement, program, run), [{}]):
        arrays |= {missing[number]: x for number, x in new_leaves.items()}
        ready = [
            bool(piece.reads or not new_leaves) and arrays.keys() >= set(piece.reads)
            for piece in waiting
        ]
        new_leaves.clear()  # `arrays` has the only references, so that a leaf can be freed
        for piece in compress(waiting, ready):
            outputs.update(
                zip(piece.makes, run(piece, arrays, [out_specs[number] for number in piece.makes]))
            )
        waiting = [piece for piece, done in zip(waiting, ready) if not done]
        live = whole_leaves.union(*(piece.reads for piece in waiting))
        arrays = {number: x for number, x in arrays.items() if number in live}
    results = jax.tree.unflatten(
        jax.tree.structure(forms), [outputs[number] for number in range(len(out_specs))]
    )
    return with_leaves(
        [arrays.get(number, form) for number, form in enumerate(leaves)], insert_shards(*results)
    )


def read_functions(params: PyTree, model_state: PyTree) -> tuple[Any, Any, ClosedJaxpr | None]:
    """Traces `params` and `model_state` if they are functions; computes nothing.

    Returns both with shapes and dtypes in place of functions, and the functions' program, or None
    without functions.
    """
    trees = {"params": params, "model_state": model_state}
    functions = {name: make for name, make in trees.items() if _is_function(make)}
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
            f"step.init: the function given for {' and '.join(functions)} is traced, so that each "
            "leaf can be computed separately, and it needs concrete numbers during tracing: use "
            "jax.numpy and jax.random in it, or call it and give the arrays. JAX reports: "
            f"{str(error).splitlines()[0]}"
        ) from error
    trees |= dict(zip(functions, forms))
    return trees["params"], trees["model_state"], program


def described_program(program: ClosedJaxpr) -> list[str]:
    """Formats a digest of a program and its constants, without unused equations, to compare."""
    (piece,) = pieces(program, [range(len(program.jaxpr.outvars))])
    closed = piece.program
    digests = [text_digest(closed)[:16], *map(_digest, closed.consts)]
    return [
        f"made by a function of digest {'-'.join(digests)} (does its key depend on the rank, or on "
        "the time?)"
    ]


def is_form(x: object) -> bool:
    """Returns True for a shape and dtype without an array."""
    return isinstance(x, jax.ShapeDtypeStruct)


def _made(placement: Placement, program: ClosedJaxpr, run: Run) -> Iterator[dict[int, Any]]:
    """Yields a program's outputs, by number: one by one, or jointly if that is much cheaper."""
    seed_program, main_program = seeded(program)
    seeds = dict(enumerate(placement.place(run_seeds(seed_program), REPLICATED)))
    for piece in each_alone(main_program):
        yield dict(zip(piece.makes, run(piece, seeds, [REPLICATED] * len(piece.makes))))


def _by_inputs(program: ClosedJaxpr) -> list[Piece]:
    """Splits a program: one part per set of inputs, and one per output without inputs."""
    groups: dict[Any, list[int]] = {}
    for output, inputs in enumerate(inputs_of_outputs(program)):
        groups.setdefault(inputs or output, []).append(output)
    return pieces(program, list(groups.values()))


def _runner(placement: Placement) -> Run:
    """Makes a function that runs parts of programs on all replicas; equal parts compile once."""
    compiled = dict[Any, tuple[ClosedJaxpr, Callable[..., Any]]]()

    def run(piece: Piece, values: Mapping[int, Any], outputs: Sequence[Any]) -> Sequence[Any]:
        form = form_of_program(piece.program), *outputs
        if form not in compiled:
            inputs = (REPLICATED,) * len(piece.reads)
            # The value references the program, because the key is valid only as long as it lives.
            compiled[form] = (
                piece.program,
                placement.program(jaxpr_as_fun(piece.program), inputs, list(outputs)),
            )
        _, program = compiled[form]
        # Waits, so that only one leaf is whole at a time.
        return jax.block_until_ready(program(*(values[number] for number in piece.reads)))

    return run


def _is_function(x: object) -> bool:
    """Returns True for a callable, unless it is a pytree of arrays, as some modules are."""
    return callable(x) and jax.tree_util.all_leaves([x])


def _check_arguments(name: str, make: Callable[..., Any]) -> None:
    """Raises TypeError if a function needs arguments."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # the function has no signature
        return
    try:
        signature.bind()
    except TypeError:
        raise TypeError(
            f"step.init: a function that is given for {name} is called without arguments, and "
            f"{make!r} needs {signature}: give functools.partial(make, ...), or a lambda."
        ) from None


def _as_given(name: str, tree: PyTree) -> Any:
    """Converts a function's result to separate arrays without weak types."""
    if name == "params":
        check_arrays(tree)

    def array(x: Any) -> Any:
        x = jnp.copy(x)
        return jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x

    return jax.tree.map(array, tree)


def _digest(x: Any) -> str:
    """Hashes an array's bits."""
    words = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return hashlib.sha256(np.asarray(words).tobytes()).hexdigest()[:16]
