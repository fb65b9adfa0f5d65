"""Python objects and trees of arrays that the processes of a group exchange.

Objects are sent as pickles of any size. Reading a pickle runs its code. The ranks of one job trust
each other, and each pickle is signed with the job's secret: a process without the secret cannot run
code on the ranks.

Source: `all_gather_object` and `broadcast_object_list` in PyTorch's `distributed_c10d.py`. Here an
error of pickling or reading is the same on every rank.
"""

import pickle
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from fddp.comm.agreement import described, verify
from fddp.comm.handshake import SECRET, signature, signed
from fddp.comm.host_bytes import CHUNK_BYTES, from_hosted, gather_bytes, hosted
from fddp.jax_internals import rows_here
from fddp.wording import check_has

if TYPE_CHECKING:  # a group has them as methods
    from fddp.comm.group import Group


Made = TypeVar("Made")
DIGITS = len(signature())  # in front of a pickle


def all_gather_object(group: "Group", obj: Any) -> list[Any]:
    data = _alike(group, "", lambda: _pickled("all_gather_object", obj))
    pickles = gather_bytes(group, data)
    return _alike(
        group,
        "",
        lambda: [_read("all_gather_object", rank, pickled) for rank, pickled in enumerate(pickles)],
    )


def broadcast_object(group: "Group", obj: Any, root: int) -> Any:
    def data_of_root() -> bytes:
        if group.rank != root:
            return b""
        return _pickled("broadcast_object", obj)

    data = _alike(group, f"root={root}", data_of_root)
    length = int(group.broadcast(np.int64(len(data)), root))
    message = group.broadcast(np.frombuffer(data.ljust(length), np.uint8), root).tobytes()
    return _alike(group, f"root={root}", lambda: _read("broadcast_object", root, message))


def _alike(group: "Group", request: str, make: Callable[[], Made]) -> Made:
    """Calls `make`; raises on all ranks if it raises on one, or if `request` differs."""
    return verify(group, "objects", make, lambda result: [request])


def _pickled(call: str, obj: Any) -> bytes:
    try:
        data = pickle.dumps(obj)
    except Exception as error:  # any error of the object's code
        raise TypeError(
            f"group.{call} sends pickles, and this {type(obj).__name__} cannot be pickled "
            f"({error}): give numbers, strings, arrays, or containers of them."
        ) from error
    return signature(data).encode() + data


def _read(call: str, rank: int, data: bytes) -> Any:
    signed_by, pickled = data[:DIGITS].decode(errors="replace"), data[DIGITS:]
    if not signed(signed_by, pickled):
        raise ValueError(
            f"group.{call}: rank {rank} signed its object with another secret: give all ranks the "
            f"same {SECRET}."
        )
    try:
        return pickle.loads(pickled)
    except Exception as error:  # for example a class unknown to this process
        raise ValueError(f"group.{call} cannot read the object of rank {rank}: {error}.") from error


### Arrays


def broadcast_tree(group: "Group", tree: Any, root: int) -> Any:
    if root not in range(group.processes):
        raise ValueError(f"root must be a rank in 0..{group.processes - 1}, got {root!r}.")
    on_hosts = partial(jax.tree.map, hosted, tree)
    arrays = jax.tree.leaves(verify(group, "trees", on_hosts, partial(described, "leaf")))
    leaves, treedef = jax.tree.flatten(tree)
    data = np.frombuffer(b"".join(x.tobytes() for x in arrays), np.uint8)
    with group.journal.call("broadcast", group.processes):
        chunks = [
            group.hosts.broadcast(data[begin : begin + CHUNK_BYTES], root)
            for begin in range(0, data.size, CHUNK_BYTES)
        ]
    received = memoryview(np.concatenate([data[:0], *chunks]).tobytes())
    ends = np.cumsum([0] + [x.nbytes for x in arrays])
    values = [
        from_hosted(np.frombuffer(received[begin:end], x.dtype).reshape(x.shape).copy(), original)
        for original, x, begin, end in zip(leaves, arrays, ends[:-1], ends[1:])
    ]
    return jax.tree.unflatten(treedef, values)


def rows(group: "Group", batch: Any) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    named = {jax.tree_util.keystr(path) or "batch": x for path, x in leaves}
    counts = {name: _count(name, x) for name, x in named.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            "group.rows: all arrays must have the same number of rows, got "
            f"{', '.join(f'{count} in {name}' for name, count in counts.items())}."
        )
    return jax.tree.map(lambda x: rows_here(x)[group.rank :: group.processes], batch)


def _count(name: str, x: Any) -> int:
    """Returns the number of rows of an array; refuses other leaves."""
    check_has("shape", f"group.rows: {name}", x, "an array, such as of np.asarray")
    if not (shape := x.shape):
        raise ValueError(
            f"group.rows: {name} has no dims, and rows lie along the first: divide the other "
            "arrays, and add this value afterwards."
        )
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        raise ValueError(
            f"group.rows: {name} is already divided among processes, by {x.sharding}: pass it to "
            "the step unchanged."
        )
    return shape[0]


def forms_of(tree: PyTree) -> Any:
    """Shapes and dtypes of arrays; NumPy arrays get the dtypes that JAX would give them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype), tree)
