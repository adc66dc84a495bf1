"""What candidates took: measurements, and which to make next."""
