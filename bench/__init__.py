"""Benchmarks: what `cupaged bench` runs."""
