"""Benchmarks: EARL beside an alternative and beside the limit, measured in one run, as ratios."""
