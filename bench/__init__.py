"""Measurements: `python -m bench.<name>`, from the root of the checkout. Results: docs/performance.md."""
