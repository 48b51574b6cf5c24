"""Traces of nsys and torch.profiler: where the time of communication goes."""
