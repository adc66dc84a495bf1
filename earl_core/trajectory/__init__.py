"""Episodes, turns and samples, and their Arrow schema."""
