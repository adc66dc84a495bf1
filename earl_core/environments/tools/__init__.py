"""Tools that a model calls while it plays.

functions       a tool from a function: its schema, its loading by import path
toolbox         tools by name: calls are checked, run, and answered by messages
episode_tools   the tools of a host and of one episode: functions, methods, servers
calculator      a tool that ships: arithmetic
python          a tool that ships: Python code in a process of its own, which `sandbox` holds
mcp             tools of servers that speak the Model Context Protocol
mcp_connection  a connection to one of them
"""
