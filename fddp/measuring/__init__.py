"""Measurements and pictures of a step's time, and the statistics of DDP's log.

This room imports step, schedules, buckets, comm and jaxpr.
"""

from fddp.measuring.measurement import MeasuredStep as MeasuredStep
from fddp.measuring.measurement import Measurement as Measurement
from fddp.measuring.measurement import measure as measure
from fddp.measuring.plots import draw as draw
from fddp.measuring.plots import figure as figure
from fddp.measuring.statistics import Stats as Stats
from fddp.measuring.statistics import stats as stats
