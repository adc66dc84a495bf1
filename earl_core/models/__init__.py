"""Where the initial model comes from when it is not there: made on the spot, or the model hub."""
