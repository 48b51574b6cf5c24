"""Which machine a record was made on: its hosts, its hardware, and a name that tells it from others."""
