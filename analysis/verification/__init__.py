"""Whether the records of a study say what its raw samples say."""
