"""Commands of `earl`: arguments and help, a module for each kind; bodies are imported late."""
