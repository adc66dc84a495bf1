"""What a stage deployment takes: the analytic model of seconds and memory."""
