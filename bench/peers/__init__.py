"""Other engines on the same workload: `python -m bench.peers`."""
