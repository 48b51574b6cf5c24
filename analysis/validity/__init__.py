"""Whether a record may be believed, and what was used of what was asked."""
