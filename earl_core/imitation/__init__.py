"""Demonstrations as rows of an iteration: chats, or episodes that another run has kept."""
