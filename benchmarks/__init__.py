"""Microbenchmarks; run from a clone with ``specdec-kernels bench OP`` or ``pytest benchmarks --benchmark-only``."""
