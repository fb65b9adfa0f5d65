"""The best bucket cap, and more replicas than there are: measured once, then simulated."""
