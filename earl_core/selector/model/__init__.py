"""What a layout takes: the analytic model of seconds and memory."""
