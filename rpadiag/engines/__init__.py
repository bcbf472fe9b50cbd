"""Adapters of the stacks that run a model. Importing this package imports neither torch nor vllm."""
