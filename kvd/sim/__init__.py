"""A cluster on a virtual clock: the daemon's own transfer core on every node, everything around it modelled.

For planning beyond the machines at hand (``kvd simulate``): hundreds of nodes, hours of requests. What the real code
decides is decided by the real code: order, budget, lanes, windows, rendezvous, deadlines. What is modelled: links by
rate and delay, prefill and decode by their speed, selection by how much of each KV block an average step wants.
"""
