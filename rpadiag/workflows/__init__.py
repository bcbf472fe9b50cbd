"""What a command does, from options to a run directory; the only place where engines meet attribution."""
