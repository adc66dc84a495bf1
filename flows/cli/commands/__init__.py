"""The commands of `earl`: arguments and help, a module for each kind. Their bodies are imported
when they run.
"""
