"""Inference engines that hand their KV cache to kvd and take it from there; each is imported by itself."""
