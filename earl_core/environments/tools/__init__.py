"""Tools that a model calls while it plays.

functions    a tool from a function: its schema, its loading by import path
toolbox      the tools of a host: calls are checked, run, and answered by messages
calculator   a tool that ships: arithmetic
python       a tool that ships: Python code in a process of its own, which `sandbox` holds
mcp          tools of servers that speak the Model Context Protocol
"""
