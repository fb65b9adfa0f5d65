"""Known faults of jaxlib releases on CPUs: wrong numbers, crashes, hangs, and extreme slowness.

The programs of the sources ran on jaxlib 0.10.1, 0.10.2, 0.11.0, 0.11.1, 0.11.2 and 0.12.0.1. For
jax#39264, jax#39741, and 0.11.0 in jax#39257 (as #40412) the reports alone are the evidence.
"""

import re
from typing import NamedTuple

# Options that avoid a fault.
YNN = "--xla_cpu_experimental_ynn_fusion_type="
SIMPLIFY = "--xla_disable_hlo_passes=algsimp"

WRONG = "wrong numbers"
CRASH = "a crash or a hang"
SLOW = "a thousandfold slowness"
JAX = "jax-ml/jax#"
XLA = "openxla/xla#"


class Fault(NamedTuple):
    """A fault of the releases from `first` to before `end`; None: of the newest too."""

    first: str
    end: str | None
    kind: str
    program: str
    source: str
    flag: str = ""
    """An option in XLA_FLAGS that avoids it."""


FAULTS = (
    Fault("0.10.2", "0.11.0", WRONG, "sums of vmapped matrix-vector products", JAX + "39103", YNN),
    Fault("0.10.0", "0.12.0", WRONG, "slices of jnp.roll that begin beyond the end", XLA + "49121"),
    Fault("0.10.0", None, WRONG, "x.at[1:].set(x[:-1]), then a reshape", XLA + "49176", SIMPLIFY),
    Fault("0.11.0", "0.11.1", "other bits in each call", "large programs", JAX + "39741"),
    Fault("0.10.2", "0.11.1", CRASH, "sums of products of seven dimensions", JAX + "39257", YNN),
    Fault("0.10.0", "0.10.2", CRASH, "the gradient of an attention layer", JAX + "39264"),
    Fault("0.11.1", "0.11.2", SLOW, "loops that write less than 256 bytes a round", JAX + "40101"),
)


def known_faults(jaxlib: str, xla_flags: str = "") -> list[Fault]:
    """Returns the faults of a release that the options in `xla_flags` do not avoid."""

    def numbers(version: str | None) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", version or "99")[:3]]

    return [
        fault
        for fault in FAULTS
        if numbers(fault.first) <= numbers(jaxlib) < numbers(fault.end)
        and not (fault.flag and fault.flag in xla_flags)
    ]


def remark(jaxlib: str, xla_flags: str) -> str:
    """Names the worst fault that another release does not have; empty without one."""
    for fault in known_faults(jaxlib, xla_flags):
        if fault.end:
            return (
                f"jaxlib {jaxlib} on CPUs has a known fault, {fault.kind}: {fault.program} "
                f"({fault.source}). `python -m fddp doctor` lists all, and what helps."
            )
    return ""
