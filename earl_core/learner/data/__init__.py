"""Packed microbatches made of shards."""
