"""Observers of a step: where its time went, which bucket cap is best, what its compiled program really does.

Nothing below imports this room; `fddp` loads it when one of its names is used.
"""
