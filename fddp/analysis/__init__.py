"""Observers of a step: its loss, its time, the best bucket cap, and the compiled program.

Nothing below imports this room; `fddp` loads it at the first use of one of its names.
"""
