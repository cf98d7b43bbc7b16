"""Moves bytes with RDMA verbs: one-sided writes and reads that the peer's CPU takes no part in.

``binding`` is the only module that imports pyverbs, ``device`` opens a device and makes its objects, ``wire`` has what
crosses to the peer, ``neighbour`` asks the kernel whether a peer can be reached without waiting, ``bringup`` begins a
connection, ``probe`` tries the path before it is used and ``path`` says what is wrong with it, ``lane`` is a queue
pair's work, ``window`` how much of it is outstanding and ``pace`` how fast it goes, ``recovery`` rebuilds a queue pair
that failed, ``revocation`` takes grants back, ``inbox`` has the peer's messages, ``endpoint`` is a connection to one
peer, ``fabric`` all.

On-demand answers are chains of WRITEs, one a row, and not SENDs into scatter lists that the sink has posted, though one
SEND costs but 0.16 (rows of 128 B) to 0.46 (1 KiB) of the instructions of 32 WRITEs on soft-RoCE (``python -m
tests.verbs.run --count -- python -m tests.verbs.bench``). A receive buffer can't be taken back: it is the next
message's, whatever that is, until it is used or its queue pair is reset. A fetch that is cancelled or late, or a lease
that goes back, would cost the queue pair on which everybody else's answers are under way, where a grant is revoked
alone; and answers would have to come in the order of the questions, where now one whose layer is not computed yet keeps
no other waiting.
"""
