"""Task directories as Harbor and Terminal-Bench have them, played by a program of the user's."""
