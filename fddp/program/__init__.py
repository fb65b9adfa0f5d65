"""A step's program: where its messages start and end.

A message is an equation of `exchange`; a `Carrier` has the calls that start and end it.
This room imports jaxpr.
"""

from fddp.program.exchange import TOKEN as TOKEN
from fddp.program.exchange import Carrier as Carrier
from fddp.program.exchange import Kind as Kind
from fddp.program.exchange import exchange as exchange
from fddp.program.overlap import overlapped as overlapped
