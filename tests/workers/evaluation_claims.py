"""What ranks find together that have unequally many rows, on rows that NumPy joins."""

import jax.numpy as jnp
import numpy as np
from workers.claims import claim, error_of

import fddp

### Rows of all ranks


def mine(group: fddp.Group, counts: list[int]) -> dict[str, np.ndarray]:
    """Of rows that are numbered through over all ranks as many as this rank has."""
    first = sum(counts[: group.rank])
    number = np.arange(first, first + counts[group.rank])
    return {"number": number, "pair": np.stack([number, -number], axis=1).astype(jnp.bfloat16)}


@claim()
def the_rows_of_all_ranks_come_in_order_of_rank_however_many_each_has(group: fddp.Group):
    # More on later ranks and none on the first, the other way round, and none anywhere.
    for counts in ([3 * rank for rank in range(group.size)], list(range(group.size, 0, -1)), [0] * group.size):
        got, number = fddp.gather_rows(mine(group, counts), group=group), np.arange(sum(counts))
        assert got["number"].tolist() == number.tolist()
        assert got["pair"].dtype == jnp.bfloat16 and got["pair"].shape == (len(number), 2)
        assert got["pair"].astype(int).tolist() == [[n, -n] for n in number]


@claim()
def rows_of_another_form_on_one_rank_are_an_error_on_all(group: fddp.Group):
    for other in (np.zeros((3, 2), np.float32), np.zeros((3, 4), np.float64)):
        rows = other if group.rank == group.size - 1 else np.zeros((3, 4), np.float32)
        message = error_of(lambda rows=rows: fddp.gather_rows({"x": rows}, group=group))
        assert "ranks differ in their rows" in message and "a row of x float32[4]" in message
    message = error_of(lambda: fddp.gather_rows(None if group.rank else "rows", group=group), TypeError)
    assert "rank 0: TypeError: fddp.gather_rows: the array must be an array of numbers, got str" in message
