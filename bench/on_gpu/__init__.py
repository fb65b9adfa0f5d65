"""The parts of bench/gpu.py: each asks one question of the GPUs that are there, in a process of its
own."""
