"""Measurements of candidates."""
