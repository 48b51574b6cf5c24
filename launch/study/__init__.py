"""Keep the folder of a study: attempts, records, the journal."""
