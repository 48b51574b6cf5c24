"""Write records to MLflow as runs."""
