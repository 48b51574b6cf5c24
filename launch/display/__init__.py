"""The terminal while a sweep runs."""
