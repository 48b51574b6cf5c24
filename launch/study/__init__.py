"""A study's folder: attempts, records, the journal."""
