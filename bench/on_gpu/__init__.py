"""The parts of bench/gpu.py: each answers one question about the GPUs in a process of its own."""
