"""What two stacks computed, laid side by side: tensors at sites, log-probabilities of tokens, and the verdict."""
