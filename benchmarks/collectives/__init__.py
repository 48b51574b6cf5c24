"""benchmark=collectives: NCCL's or gloo's collectives by message size, as nccl-tests measures them."""
