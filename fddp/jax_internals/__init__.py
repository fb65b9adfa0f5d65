"""All uses of JAX's internals, which a new version may change without notice: repair them here.

For the other rooms a program is inputs, constants, equations and outputs, as in `jax.extend.core`,
and an equation is inputs, outputs and a name. `tests/test_jax_internals.py` tests this room with
the installed JAX. Every other room imports this room, which imports none.
"""

from fddp.jax_internals.arrays import given_away as given_away
from fddp.jax_internals.arrays import on_mesh as on_mesh
from fddp.jax_internals.arrays import part_shape as part_shape
from fddp.jax_internals.arrays import parts_here as parts_here
from fddp.jax_internals.arrays import replicated_over as replicated_over
from fddp.jax_internals.arrays import resharded as resharded
from fddp.jax_internals.arrays import rows_here as rows_here
from fddp.jax_internals.collective_equations import COLLECTIVES as COLLECTIVES
from fddp.jax_internals.collective_equations import axes_of as axes_of
from fddp.jax_internals.collective_equations import dims_of as dims_of
from fddp.jax_internals.collective_equations import sets_of as sets_of
from fddp.jax_internals.collective_equations import unbound_axis as unbound_axis
from fddp.jax_internals.collective_equations import ways_of as ways_of
from fddp.jax_internals.configuration import CPU_OPTIONS as CPU_OPTIONS
from fddp.jax_internals.configuration import GPU_OPTIONS as GPU_OPTIONS
from fddp.jax_internals.configuration import OVERLAP_OPTIONS as OVERLAP_OPTIONS
from fddp.jax_internals.configuration import PIPELINED_ROUNDS as PIPELINED_ROUNDS
from fddp.jax_internals.configuration import asked_for as asked_for
from fddp.jax_internals.configuration import cache_small_programs as cache_small_programs
from fddp.jax_internals.configuration import compilation_cache as compilation_cache
from fddp.jax_internals.configuration import compile_to_read as compile_to_read
from fddp.jax_internals.configuration import context_mesh as context_mesh
from fddp.jax_internals.configuration import staged_out as staged_out
from fddp.jax_internals.configuration import trace_settings as trace_settings
from fddp.jax_internals.configuration import transformed as transformed
from fddp.jax_internals.configuration import without_context_mesh as without_context_mesh
from fddp.jax_internals.configuration import without_jit as without_jit
from fddp.jax_internals.hlo import Module, parse
from fddp.jax_internals.hlo_collectives import KINDS, Collective, find_collectives, heavy_operations
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
from fddp.jax_internals.jaxprs import acts_alike as acts_alike
from fddp.jax_internals.jaxprs import barrier_before as barrier_before
from fddp.jax_internals.jaxprs import branches as branches
from fddp.jax_internals.jaxprs import called_program as called_program
from fddp.jax_internals.jaxprs import contracted_dims as contracted_dims
from fddp.jax_internals.jaxprs import dims_of_reduction as dims_of_reduction
from fddp.jax_internals.jaxprs import inner_programs as inner_programs
from fddp.jax_internals.jaxprs import is_for_platforms as is_for_platforms
from fddp.jax_internals.jaxprs import jaxpr_as_fun as jaxpr_as_fun
from fddp.jax_internals.jaxprs import joined_dim as joined_dim
from fddp.jax_internals.jaxprs import make_program as make_program
from fddp.jax_internals.jaxprs import named_as as named_as
from fddp.jax_internals.jaxprs import named_like as named_like
from fddp.jax_internals.jaxprs import new_variable as new_variable
from fddp.jax_internals.jaxprs import of_a_vector as of_a_vector
from fddp.jax_internals.jaxprs import ordered as ordered
from fddp.jax_internals.jaxprs import over_axes as over_axes
from fddp.jax_internals.jaxprs import pads_layers as pads_layers
from fddp.jax_internals.jaxprs import parameters as parameters
from fddp.jax_internals.jaxprs import permutes as permutes
from fddp.jax_internals.jaxprs import rematerialised as rematerialised
from fddp.jax_internals.jaxprs import run_again as run_again
from fddp.jax_internals.jaxprs import scattered_rows as scattered_rows
from fddp.jax_internals.jaxprs import scope_of as scope_of
from fddp.jax_internals.loops import loop_parts, run_while, scan_body, while_programs, without_refs
from fddp.jax_internals.mesh_free import MESH_ERRORS, inner_map, line_of_mesh, without_meshes
from fddp.jax_internals.processes import backends_started as backends_started
from fddp.jax_internals.processes import bind_gloo as bind_gloo
from fddp.jax_internals.processes import connect_to_service as connect_to_service
from fddp.jax_internals.processes import coordination_client as coordination_client
from fddp.jax_internals.processes import gloo_host as gloo_host
from fddp.jax_internals.processes import leave_service as leave_service
from fddp.jax_internals.processes import secured as secured
from fddp.jax_internals.profiles import read_profile
from fddp.jax_internals.service import HEARTBEAT_S
