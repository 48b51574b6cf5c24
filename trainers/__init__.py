"""What is measured: models, batches, the training step and the strategies of synchronisation."""
