"""Kernels of kvd: choosing and splitting a KV index, moving KV entries, counting selections, comparing hash codes,
changing layouts.

C (AVX2 where the CPU has it) when the extension was built, NumPy otherwise, with the same results. Words and
shapes:

- a *KV entry* is `entry_bytes` of one token, one KV head, one layer; the KV memory of a layer is entries in
  the order (batch row b, token t, head h), so that entry ``(b * N + t) * H + h`` begins at ``entry_bytes``
  times that number;
- a *KV index* is int32 (B·H, k): the token positions that row ``b * H + h`` wants;
- a *mask* is int8 (B, N): 0 padding, 1 local, 2 remote.

The package imports NumPy and nothing else, neither kvd nor kvd_client.
"""

from .blocks import block_page_bytes, decode_bfp, encode_bfp
from .choosing import top_k
from .hashing import hamming, sign_codes
from .native import available, implementation, select, why_not_native
from .ops import accumulate, accumulate_blocks, copy_runs, gather, partition, scatter, token_entries
from .regrouping import regroup, zero

__all__ = [
    "accumulate",
    "accumulate_blocks",
    "available",
    "block_page_bytes",
    "copy_runs",
    "decode_bfp",
    "encode_bfp",
    "gather",
    "hamming",
    "implementation",
    "partition",
    "regroup",
    "scatter",
    "select",
    "sign_codes",
    "token_entries",
    "top_k",
    "why_not_native",
    "zero",
]
