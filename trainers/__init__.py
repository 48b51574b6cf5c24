"""What is measured: models, synthetic batches, the training step and the strategies that synchronise gradients."""
