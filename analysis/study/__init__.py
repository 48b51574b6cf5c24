"""What a study is: its records, its runs, names, provenance, intervals and the noise floor."""
