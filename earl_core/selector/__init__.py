"""Parallelism Selector: picks each stage's deployment before it runs. Pure, imports no torch."""
