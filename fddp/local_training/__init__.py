"""Local training: islands of replicas train separately, and synchronize periodically.

Asynchronous islands send pseudo-gradients to the keeper: a parameter server, in a process that rank
0 starts. The optimizers of such steps are in optim. This room imports step and the rooms below it.
"""

from fddp.local_training.in_turn import InTurn as InTurn
from fddp.local_training.in_turn import Islands as Islands
from fddp.local_training.in_turn import replay as replay
from fddp.local_training.in_turn import train_in_order as train_in_order
from fddp.local_training.island_groups import as_islands_of as as_islands_of
from fddp.local_training.island_groups import in_islands as in_islands
from fddp.local_training.island_runner import islands as islands
from fddp.local_training.island_state import Island as Island
from fddp.local_training.keeper_door import join_keeper as join_keeper
from fddp.local_training.local_runner import local_way as local_way
from fddp.local_training.merge_log import read_log as read_log
from fddp.local_training.merging import first_shared as first_shared
from fddp.local_training.merging import merging_of as merging_of
from fddp.local_training.merging import on_this_host as on_this_host
