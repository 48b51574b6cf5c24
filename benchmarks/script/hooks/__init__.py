"""A folder that only the ranks of a script have on PYTHONPATH."""
