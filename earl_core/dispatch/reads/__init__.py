"""Layouts, plans and batches: the rows that each rank reads."""
