"""Jobs whose ranks come and go: the remaining ranks train on, and late ranks join.

The core does not import this room; `fddp.init(elastic=True)` loads it. This room imports all
others but analysis.
"""

from fddp.elastic.job import join_job as join_job
from fddp.elastic.trainer import ElasticStats as ElasticStats
from fddp.elastic.trainer import Trainer as Trainer
from fddp.elastic.views import Excluded as Excluded
from fddp.elastic.views import NoQuorum as NoQuorum
