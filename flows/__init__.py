"""What runs after what. No tensors here, and no torch in this process."""
