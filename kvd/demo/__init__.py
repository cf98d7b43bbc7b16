"""``kvd demo``: a real model prefills in one process and decodes in another, two daemons between them.

The process that the user starts imports neither torch nor transformers: it starts the daemons and the two
inference processes, plays the router between them, and shows what happens.
"""
