"""Images per second: against the number of GPUs, and against an option that is a number."""
