"""What ranks that go on from cell to cell do to numbers: pools that drift, and the proof that warm equals cold."""
