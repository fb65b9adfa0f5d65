"""Flax's modules as pure losses, and BatchNorm over the rows of all replicas.

Loaded only when they are used, for they need all of Flax. This room imports step, losses and jaxpr.
"""
