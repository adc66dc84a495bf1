"""Builders that make a model directory on the spot when nothing can be downloaded."""
