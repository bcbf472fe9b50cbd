"""Reports: pages and summaries drawn from finished runs. No engine, no torch, no numbers of their own."""
