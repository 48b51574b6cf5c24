"""Refuse what cannot run, or must not be written, before anything starts: each file looks at one thing."""
