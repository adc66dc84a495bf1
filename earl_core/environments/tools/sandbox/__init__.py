"""A process that holds code of a model: namespaces where they can be had, filters where not.

`program` runs it, in an interpreter of its own that imports this package and the standard library
alone. `groups` is the caller's part.
"""
