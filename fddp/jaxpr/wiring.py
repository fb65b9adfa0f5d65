"""Hashes how a program computes its outputs, so that ranks can compare their programs."""

from hashlib import sha256

from fddp.jax_internals import ClosedJaxpr, Jaxpr, Literal, Var, inner_programs
from fddp.jaxpr.equations import form_of, straighten


def wiring(closed: ClosedJaxpr) -> bytes:
    """Hashes which operations make each output from which inputs.

    Numbers do not count, nor does what no output needs: a rank's number may be a constant, and one
    rank alone may print.
    """
    return _hash(*_outputs(straighten(closed).jaxpr))


def _outputs(jaxpr: Jaxpr) -> list[bytes]:
    hashes = dict[Var, bytes]()
    for k, var in enumerate(jaxpr.invars):
        hashes[var] = b"input %d" % k

    def read(atom: Var | Literal) -> bytes:
        return b"constant" if isinstance(atom, Literal) else hashes.get(atom, b"constant")

    for eqn in jaxpr.eqns:
        inner = [_hash(*_outputs(body)) for body in inner_programs(eqn)]
        made = _hash(eqn.primitive.name.encode(), *inner, b"of", *map(read, eqn.invars))
        for k, var in enumerate(eqn.outvars):
            hashes[var] = _hash(made, b"%d" % k, str(form_of(var)).encode())
    return list(map(read, jaxpr.outvars))


def _hash(*parts: bytes) -> bytes:
    return sha256(b"\0".join(parts)).digest()
