"""All that fddp reads of JAX and no version of it promises: the one place to mend when a new JAX has changed inside.

Elsewhere a program is only inputs, constants, equations and outputs, as `jax.extend.core` names them, and an equation
its inputs, its outputs and a name. `tests/test_jax_internals.py` tries everything here on the JAX that is installed.
Every other room imports this room, which imports none.
"""

from fddp.jax_internals.arrays import given_away as given_away
from fddp.jax_internals.arrays import part_shape as part_shape
from fddp.jax_internals.arrays import parts_here as parts_here
from fddp.jax_internals.arrays import with_parts_listed as with_parts_listed
from fddp.jax_internals.collective_equations import COLLECTIVES as COLLECTIVES
from fddp.jax_internals.collective_equations import INDEX as INDEX
from fddp.jax_internals.collective_equations import axes_of as axes_of
from fddp.jax_internals.collective_equations import exchanged_dims as exchanged_dims
from fddp.jax_internals.collective_equations import gathered_dim as gathered_dim
from fddp.jax_internals.collective_equations import scattered_dim as scattered_dim
from fddp.jax_internals.collective_equations import sets_of as sets_of
from fddp.jax_internals.collective_equations import ways_of as ways_of
from fddp.jax_internals.compiled import compile_to_read as compile_to_read
from fddp.jax_internals.compiled import host_cpu as host_cpu
from fddp.jax_internals.compiled import packed as packed
from fddp.jax_internals.compiled import unpacked as unpacked
from fddp.jax_internals.configuration import OVERLAP_OPTIONS as OVERLAP_OPTIONS
from fddp.jax_internals.configuration import PIPELINED_ROUNDS as PIPELINED_ROUNDS
from fddp.jax_internals.configuration import asked_for as asked_for
from fddp.jax_internals.configuration import compilation_cache as compilation_cache
from fddp.jax_internals.configuration import transformed as transformed
from fddp.jax_internals.configuration import with_configuration as with_configuration
from fddp.jax_internals.configuration import without_jit as without_jit
from fddp.jax_internals.equal_programs import form_of_program as form_of_program
from fddp.jax_internals.jaxprs import CALLS as CALLS
from fddp.jax_internals.jaxprs import OWN_DERIVATIVE as OWN_DERIVATIVE
from fddp.jax_internals.jaxprs import REMATERIALISED as REMATERIALISED
from fddp.jax_internals.jaxprs import WRAPPERS as WRAPPERS
from fddp.jax_internals.jaxprs import ClosedJaxpr as ClosedJaxpr
from fddp.jax_internals.jaxprs import Jaxpr as Jaxpr
from fddp.jax_internals.jaxprs import JaxprEqn as JaxprEqn
from fddp.jax_internals.jaxprs import Literal as Literal
from fddp.jax_internals.jaxprs import Var as Var
from fddp.jax_internals.jaxprs import acts as acts
from fddp.jax_internals.jaxprs import along_first_dim as along_first_dim
from fddp.jax_internals.jaxprs import barrier_before as barrier_before
from fddp.jax_internals.jaxprs import branches as branches
from fddp.jax_internals.jaxprs import callbacks as callbacks
from fddp.jax_internals.jaxprs import called_program as called_program
from fddp.jax_internals.jaxprs import contracted_dims as contracted_dims
from fddp.jax_internals.jaxprs import dims_of_reduction as dims_of_reduction
from fddp.jax_internals.jaxprs import inner_programs as inner_programs
from fddp.jax_internals.jaxprs import is_for_platforms as is_for_platforms
from fddp.jax_internals.jaxprs import jaxpr_as_fun as jaxpr_as_fun
from fddp.jax_internals.jaxprs import joins_first_dim as joins_first_dim
from fddp.jax_internals.jaxprs import loop_parts as loop_parts
from fddp.jax_internals.jaxprs import make_program as make_program
from fddp.jax_internals.jaxprs import named_as as named_as
from fddp.jax_internals.jaxprs import new_variable as new_variable
from fddp.jax_internals.jaxprs import of_a_vector as of_a_vector
from fddp.jax_internals.jaxprs import over_axes as over_axes
from fddp.jax_internals.jaxprs import pads_rows as pads_rows
from fddp.jax_internals.jaxprs import permutes as permutes
from fddp.jax_internals.jaxprs import rematerialised as rematerialised
from fddp.jax_internals.jaxprs import run_again as run_again
from fddp.jax_internals.jaxprs import run_as_it_is as run_as_it_is
from fddp.jax_internals.jaxprs import scan_body as scan_body
from fddp.jax_internals.jaxprs import scattered_rows as scattered_rows
from fddp.jax_internals.jaxprs import shorter_scan as shorter_scan
from fddp.jax_internals.jaxprs import while_programs as while_programs
from fddp.jax_internals.jaxprs import without_dead_code as without_dead_code
from fddp.jax_internals.processes import backends_started as backends_started
from fddp.jax_internals.processes import coordination_client as coordination_client
from fddp.jax_internals.processes import secured as secured
from fddp.jax_internals.profiles import Event as Event
from fddp.jax_internals.profiles import Plane as Plane
from fddp.jax_internals.profiles import read_profile as read_profile
from fddp.jax_internals.service import HEARTBEAT_S as HEARTBEAT_S
