"""The kvstore-like strategies: arrays in buckets, and servers that sum and update."""
