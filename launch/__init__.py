"""Where it runs: plan cells, start and supervise ranks, keep the records, project them to MLflow.
Never imports torch."""
