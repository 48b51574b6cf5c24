"""The sections of a report, one file for each question."""
