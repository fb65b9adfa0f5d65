"""Who the replicas are, and what they say to each other.

A group is replicas with equal parameters: devices along an axis of a mesh, or ranks of MPI. Here are the collectives of
their programs and of their hosts, the places where arrays lie, and the words in which ranks disagree. This room imports
no other.
"""

from fddp.comm.agreement import described as described
from fddp.comm.agreement import shortened as shortened
from fddp.comm.agreement import verify as verify
from fddp.comm.communicator import MOST as MOST
from fddp.comm.communicator import Communicator as Communicator
from fddp.comm.communicator import axis_communicator as axis_communicator
from fddp.comm.communicator import psum_bytes as psum_bytes
from fddp.comm.communicator import taken as taken
from fddp.comm.communicator import told as told
from fddp.comm.group import AXIS as AXIS
from fddp.comm.group import Group as Group
from fddp.comm.group import mesh_group as mesh_group
from fddp.comm.group import mpi_group as mpi_group
from fddp.comm.group import replica_mesh as replica_mesh
from fddp.comm.member import EVERYWHERE as EVERYWHERE
from fddp.comm.member import Member as Member
from fddp.comm.member import lifted as lifted
from fddp.comm.member import lowered as lowered
from fddp.comm.member import trace as trace
from fddp.comm.mesh import mesh_member as mesh_member
from fddp.comm.placement import laid_out as laid_out
from fddp.comm.placement import other_axes as other_axes
from fddp.comm.placement import parts as parts
from fddp.comm.placement import specs as specs
from fddp.comm.recovery import poll as poll
from fddp.comm.rotation import round_robin as round_robin
