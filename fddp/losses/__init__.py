"""Losses in one form, and the weighted sums of micro-batches in a step.

A step is Σ w·g / Σ w over replicas and micro-batches. Mixed precision is here, too.

This room imports jaxpr.
"""

from fddp.losses.batches import Joined as Joined
from fddp.losses.batches import Stacked as Stacked
from fddp.losses.batches import Undivided as Undivided
from fddp.losses.batches import count_rows as count_rows
from fddp.losses.batches import is_rows as is_rows
from fddp.losses.batches import lists_of_numbers as lists_of_numbers
from fddp.losses.batches import not_numeric as not_numeric
from fddp.losses.batches import rows_of_batch as rows_of_batch
from fddp.losses.batches import unjoined as unjoined
from fddp.losses.batches import unlike as unlike
from fddp.losses.objective import Evaluated, Objective, make_objective
from fddp.losses.precision import mixed_precision
from fddp.losses.results import Weighted, check_callable
from fddp.losses.rng import Shared, folded
from fddp.losses.sums import Pending as Pending
from fddp.losses.sums import Sums as Sums
from fddp.losses.sums import accumulate as accumulate
from fddp.losses.sums import add_trees as add_trees
from fddp.losses.sums import contribute as contribute
from fddp.losses.sums import in_unit as in_unit
from fddp.losses.sums import mean as mean
from fddp.losses.sums import plus as plus
from fddp.losses.sums import reached as reached
from fddp.losses.sums import split_rows as split_rows
