"""Hours of mixed load on real daemons, for leaks that no single test shows."""
