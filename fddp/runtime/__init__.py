"""Starts processes, joins them to one world and ends them together.

The variables of a launcher give the rank of a process. The processes meet and choose a backend. An
error on one rank ends all; `watching` names it. This room imports comm.
"""

from fddp.runtime.children import cores_for as cores_for
from fddp.runtime.coordinator import start_service as start_service
from fddp.runtime.hints import hint as hint
from fddp.runtime.jaxlib_faults import known_faults as known_faults
from fddp.runtime.join_service import all_devices as all_devices
from fddp.runtime.launchers import launcher_variables as launcher_variables
from fddp.runtime.launchers import read_launch as read_launch
from fddp.runtime.packages import expect_no_gpu as expect_no_gpu
from fddp.runtime.packages import fddp_version as fddp_version
from fddp.runtime.packages import installed as installed
from fddp.runtime.packages import missing_compiler as missing_compiler
from fddp.runtime.place import Launch as Launch
from fddp.runtime.place import is_of_this_host as is_of_this_host
from fddp.runtime.place import place_of as place_of
from fddp.runtime.place import proxies as proxies
from fddp.runtime.place import without_proxies as without_proxies
from fddp.runtime.replacing import FINISHED as FINISHED
from fddp.runtime.replacing import FOLDER as FOLDER
from fddp.runtime.replacing import LOST as LOST
from fddp.runtime.replacing import MEMBERS as MEMBERS
from fddp.runtime.spawn import launch as launch
from fddp.runtime.training_loop import alive as alive
from fddp.runtime.training_loop import preempted as preempted
from fddp.runtime.world import group_of as group_of
from fddp.runtime.world import init as init
from fddp.runtime.world import renew as renew
from fddp.runtime.world import shutdown as shutdown
