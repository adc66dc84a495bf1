"""Environments in processes of their own: the pool, its hosts, and the calls between them."""
