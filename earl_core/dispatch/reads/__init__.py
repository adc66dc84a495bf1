"""Who reads what: layouts, plans, batches."""
