"""Look at this machine: its devices, and the facts that a record keeps."""
