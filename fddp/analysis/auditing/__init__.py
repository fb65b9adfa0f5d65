"""Comparison of a compiled step with its plan, for GPUs that need not be attached."""
