"""Clocks, statistics of times, and ranks that start together."""
