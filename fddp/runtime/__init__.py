"""Starts processes, joins them to one world and ends them together.

The variables of a launcher give the rank of a process. The processes meet and choose a backend. An
error on one rank ends all; `watching` names it. This room imports comm.
"""

from fddp.runtime.children import cores_for
from fddp.runtime.hints import hint
from fddp.runtime.jaxlib_faults import known_faults
from fddp.runtime.join_service import all_devices, start_service
from fddp.runtime.launchers import launcher_variables, read_launch
from fddp.runtime.packages import expect_no_gpu, fddp_version, installed, missing_compiler
from fddp.runtime.place import Launch, is_of_this_host, place_of, proxies, without_proxies
from fddp.runtime.replacing import FINISHED, FOLDER, LOST, MEMBERS
from fddp.runtime.spawn import launch
from fddp.runtime.training_loop import alive, preempted
from fddp.runtime.world import group_of, init, renew, shutdown
