"""Board games for two, and their opponents."""
