"""Benchmarks: a YAML each, and a module where options must fit each other (conf.requests)."""
