"""A compiled step held against its plan, on GPUs that need not be there."""
