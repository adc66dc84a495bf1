"""The device mesh, and a model split over it."""
