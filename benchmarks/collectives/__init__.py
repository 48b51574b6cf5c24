"""benchmark=collectives: collectives by message size, as nccl-tests measures them."""
