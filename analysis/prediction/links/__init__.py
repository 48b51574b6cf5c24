"""KnownLinks: how long a collective takes over which wire."""
