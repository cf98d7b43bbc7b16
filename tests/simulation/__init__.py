"""Several nodes on a virtual clock: the real transfer core against modelled links, memory and processes."""
