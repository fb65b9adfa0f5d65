"""The replicas of a training, and their collectives.

A group is a set of replicas with equal parameters: devices along an axis of a mesh, or MPI ranks.
The room holds the collectives of their programs and of their hosts, the placement of their arrays,
and the checks that ranks agree. This room imports jaxpr and program.
"""

from fddp.comm.agreement import described, nothing_to_compare, shortened, verify
from fddp.comm.communicator import MOST as MOST
from fddp.comm.communicator import Communicator as Communicator
from fddp.comm.communicator import add_bytes as add_bytes
from fddp.comm.communicator import add_rows as add_rows
from fddp.comm.communicator import as_uint32 as as_uint32
from fddp.comm.communicator import axis_communicator as axis_communicator
from fddp.comm.communicator import count_aside as count_aside
from fddp.comm.communicator import count_bytes as count_bytes
from fddp.comm.communicator import more_sent as more_sent
from fddp.comm.group import Group
from fddp.comm.handshake import SECRET as SECRET
from fddp.comm.handshake import answer_calls as answer_calls
from fddp.comm.handshake import call as call
from fddp.comm.handshake import calls_at as calls_at
from fddp.comm.handshake import introduce as introduce
from fddp.comm.handshake import new_secret as new_secret
from fddp.comm.handshake import receive as receive
from fddp.comm.handshake import send as send
from fddp.comm.handshake import signature as signature
from fddp.comm.host_bytes import from_hosted, hosted
from fddp.comm.journal import Finding, Journal
from fddp.comm.lane_thread import Stamps as Stamps
from fddp.comm.lane_thread import library
from fddp.comm.mesh import mesh_group, replica_mesh, world_group
from fddp.comm.mesh_programs import mesh_placement
from fddp.comm.mpi import mpi_group
from fddp.comm.objects import forms_of
from fddp.comm.placement import AXIS as AXIS
from fddp.comm.placement import REPLICATED as REPLICATED
from fddp.comm.placement import Placement as Placement
from fddp.comm.placement import add_replica_dim as add_replica_dim
from fddp.comm.placement import as_program as as_program
from fddp.comm.placement import device_cache as device_cache
from fddp.comm.placement import device_parts as device_parts
from fddp.comm.placement import drop_replica_dim as drop_replica_dim
from fddp.comm.placement import forget_device_caches as forget_device_caches
from fddp.comm.placement import laid_out as laid_out
from fddp.comm.placement import of_one_replica as of_one_replica
from fddp.comm.placement import specs as specs
from fddp.comm.placement import trace as trace
from fddp.comm.progress_reports import reports
from fddp.comm.rank_connections import host_key, host_keys, own_addresses
from fddp.comm.round_robin import round_robin
from fddp.comm.summation_tree import block_of, tree_bytes, tree_reduce, tree_sum
from fddp.comm.transport import Hosts, Transport
