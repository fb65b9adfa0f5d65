"""Flax's modules as pure losses, and BatchNorm over the rows of all replicas.

Its modules are loaded on first use, since they import all of Flax. This room imports sharding,
step, losses, buckets and jaxpr.
"""
