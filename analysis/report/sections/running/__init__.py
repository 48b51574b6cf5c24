"""Sections on how a study was run."""
