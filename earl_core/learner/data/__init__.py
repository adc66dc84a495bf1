"""From shards to packed microbatches."""
