"""Islands that do not wait: they exchange pseudo-gradients with a parameter server one by one.

The server runs in a process that rank 0 starts, each island is its client, and the `local_steps` of
a user chooses between such islands and those of local_training. This room imports training,
local_training, step and the rooms below.
"""

from fddp.islands.local_steps import local_steps as local_steps
from fddp.islands.local_steps import meet as meet
from fddp.islands.simulated_islands import replay_islands as replay_islands
from fddp.islands.simulated_islands import simulate_islands as simulate_islands
from fddp.islands.simulation import Islands as Islands
