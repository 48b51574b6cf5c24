"""The commands of `python -m analysis`; those that read the same input share a file."""
