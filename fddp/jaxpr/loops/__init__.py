"""Splits and fuses the loops of a program, and runs them with other layers.

`lax.scan` over stacked layers is a single equation, but its outputs become ready, and its inputs
are read, layer by layer. This room imports `equations`, `flow` and `interpreter` of `fddp.jaxpr`.
"""
