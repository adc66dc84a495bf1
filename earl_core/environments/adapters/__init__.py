"""Environments and agents of other libraries, and the data sets of `prompt`, as EARL's."""
