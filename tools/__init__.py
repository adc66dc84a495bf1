"""Instruments, and what they, the benchmarks and the tests share."""
