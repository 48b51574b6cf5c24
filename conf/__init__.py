"""What is asked: the typed schema of a study, its YAML groups, and the checks that run before any
process starts."""
