"""Benches: one module a question, each run by `python -m bench NAME`."""
