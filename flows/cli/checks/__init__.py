"""The checks of `earl doctor`, a module for each topic. None imports torch or vllm."""
