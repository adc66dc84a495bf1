"""Copies of shards on any storage that fsspec knows."""
