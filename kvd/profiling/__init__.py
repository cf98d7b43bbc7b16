"""Recording selections, profile files, the times of prefill and transfer, comparisons and pictures."""
