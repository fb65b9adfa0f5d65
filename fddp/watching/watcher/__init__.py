"""The process beside each rank that watches it. It loads the standard library alone, and nothing else of fddp."""
