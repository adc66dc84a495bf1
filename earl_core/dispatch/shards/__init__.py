"""Arrow shards and the manifests that describe them."""
