"""Statistics that know nothing of records: arrays in, arrays out."""
