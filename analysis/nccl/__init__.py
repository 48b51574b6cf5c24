"""What NCCL's log says: communicators, channels, transports, settings."""
