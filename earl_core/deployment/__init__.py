"""What is laid out, and how: words that configuration, selector, controller and ranks share."""
