"""Advice: which GPUs, strategy and NCCL settings a forecast puts first, and which cells are worth measuring to decide."""
