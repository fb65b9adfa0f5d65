"""Runs a program of whole arrays, such as an optimizer's update, on parts of them.

The equations decide which results are parts, and which need collectives or whole arrays. This room
imports `cost`, `equations` and `interpreter` of `fddp.jaxpr`.
"""
