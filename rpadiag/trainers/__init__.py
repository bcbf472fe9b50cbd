"""rpadiag inside a trainer that is running: one module for each trainer, imported only where that trainer is installed."""
