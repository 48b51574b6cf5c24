"""Show a sweep on the terminal while it runs."""
