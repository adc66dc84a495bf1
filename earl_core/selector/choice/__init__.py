"""Which layout is taken: candidates, policies, reasons."""
