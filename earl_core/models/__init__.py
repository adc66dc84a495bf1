"""Sources of the initial model when it is not there: made on the spot, or the model hub."""
