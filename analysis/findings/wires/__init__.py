"""What the wires of a machine carry, and how what cells lose follows from it."""
