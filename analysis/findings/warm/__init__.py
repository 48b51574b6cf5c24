"""What warm ranks do to numbers: pools that drift, and the proof that warm equals cold."""
