"""Measurements of training steps and of gradient exchanges."""
