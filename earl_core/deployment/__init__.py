"""How a stage is laid out on the hardware: words that configuration, selector and ranks share."""
