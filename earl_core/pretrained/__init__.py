"""Pretrained models: what their directory says, and transformers without side imports."""
