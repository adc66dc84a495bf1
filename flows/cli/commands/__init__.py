"""The commands of `earl`: arguments and help, a module for each kind. What they do is imported when
they run.
"""
