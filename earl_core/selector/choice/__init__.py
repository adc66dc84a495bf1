"""Choice of stage deployments: candidates, policies, reasons."""
