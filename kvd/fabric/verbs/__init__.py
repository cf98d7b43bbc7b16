"""Moves bytes with RDMA verbs: one-sided writes and reads that the peer's CPU takes no part in.

``binding`` is the only module that imports pyverbs, ``device`` opens a device and makes its objects, ``wire`` has what
crosses to the peer, ``lane`` is a queue pair's work, ``endpoint`` a connection to one peer, ``fabric`` the fabric.
"""
