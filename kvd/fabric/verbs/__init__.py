"""Moves bytes with RDMA verbs: one-sided writes and reads that the peer's CPU takes no part in.

``binding`` is the only module that imports pyverbs, ``device`` opens a device and makes its objects, ``wire`` has what
crosses to the peer, ``lane`` is a queue pair's work and ``window`` how much of it is outstanding, ``recovery`` rebuilds
a queue pair that failed, ``revocation`` takes grants back, ``endpoint`` is a connection to one peer, ``fabric`` all.
"""
