"""What layouts took: measurements, and which to make next."""
