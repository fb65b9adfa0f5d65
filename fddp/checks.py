"""What a step refuses in each call, in the user's words, before JAX says it in its own."""

from typing import Any

import jax

from fddp.plan import BucketPlan
from fddp.replicas import described

MOST = 4  # leaves that a message names


def refuse_deleted(state: Any) -> None:
    """Says that a state's memory was used for something else; where a process has several devices JAX would crash.

    Args:
      state: what a step was given.

    Raises:
      ValueError: an array of it was donated.
    """
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
        raise ValueError(
            "this state is used up: a step that was given it has used its memory for the next one. Go on with the "
            "state that the step returned, or make the step with donate=False to use a state several times."
        )


def check_params(plan: BucketPlan, params: Any) -> None:
    """Says that parameters are those of another model.

    Args:
      plan: of the step.
      params: what it was given.

    Raises:
      ValueError: the trees differ; the message names leaves.
    """
    if jax.tree.structure(params) == plan.treedef:
        return
    got, planned = set(described("", params)), set(map(str, plan.leaves))
    raise ValueError(
        "these parameters are not those of the model that this step was made for: they have "
        f"{'; '.join(sorted(got - planned)[:MOST]) or 'nothing else'}, and lack "
        f"{'; '.join(sorted(planned - got)[:MOST]) or 'nothing'}. Make a step of its own for each model."
    )
