"""The analytic model of a stage deployment's seconds and memory."""
