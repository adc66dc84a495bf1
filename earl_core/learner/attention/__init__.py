"""Variable-length attention over packed samples."""
