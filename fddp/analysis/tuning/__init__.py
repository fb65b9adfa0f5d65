"""Search for the best bucket cap, and projection of a measured step to more replicas."""
