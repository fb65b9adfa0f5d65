"""Local training: islands of replicas train separately, and synchronize periodically.

Islands that do not wait for each other are in islands. This room imports step and the rooms below
it.
"""

from fddp.local_training.inside import array_of as array_of
from fddp.local_training.local_optimizer import LocalSteps as LocalSteps
from fddp.local_training.local_runner import LocalWay as LocalWay
from fddp.local_training.local_runner import SyncSteps as SyncSteps
from fddp.local_training.local_runner import local_way as local_way
from fddp.local_training.periods import read_periods as read_periods
