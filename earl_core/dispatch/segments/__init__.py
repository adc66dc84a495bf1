"""Recycled segments of shared memory: pool, leases, names."""
