"""Words for stages and their layout, shared by configuration, selector, controller and ranks."""
