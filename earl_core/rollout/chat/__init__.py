"""Chats as tokens: templates, the ends of turns, calls of tools."""
