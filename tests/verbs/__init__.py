"""Tests of the verbs fabric, run in a guest kernel with soft-RoCE where the host has no RDMA device."""
