"""Memory in which messages land, used again as soon as nobody reads it any more.

Fresh memory is paid for page by page, when it is first written to: on two hosts, a core each, that took 4 % of a step.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from jaxtyping import Shaped

ALIGNMENT = 64


def landing() -> Callable[[Shaped[np.ndarray, " n"]], Shaped[np.ndarray, " n"]]:
    """Makes a function that gives arrays to receive into; call it from one thread at a time.

    Returns:
      `like(x)` → an array of the size and dtype of `x` with arbitrary content, aligned so that XLA takes it over
      without a copy. Its memory is given out again when it and everything that looks into it (views, JAX arrays) is
      gone.

    Example:
      >>> import numpy as np
      >>> like = landing()
      >>> first = like(np.zeros(3))
      >>> address = first.ctypes.data
      >>> del first
      >>> like(np.ones(3)).ctypes.data == address
      True
    """
    idle: defaultdict[int, list[np.ndarray]] = defaultdict(list)

    def like(x: Shaped[np.ndarray, " n"]) -> Shaped[np.ndarray, " n"]:
        spare = idle[x.nbytes]
        room = spare.pop() if spare else _aligned(x.nbytes)
        # Over a memoryview, `.data`: views of it then keep this very array alive, and not only the memory below.
        landed = np.frombuffer(room.data, x.dtype)
        weakref.finalize(landed, spare.append, room)
        return landed

    return like


def _aligned(nbytes: int) -> np.ndarray:
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + nbytes]
