"""Tables of nccl-tests, as text or JSON."""
