"""Where the wall time of cells and of sweeps went."""
