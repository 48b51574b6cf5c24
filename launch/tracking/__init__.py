"""Records as MLflow runs."""
