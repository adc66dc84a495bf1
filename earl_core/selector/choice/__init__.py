"""Which stage deployment is taken: candidates, policies, reasons."""
