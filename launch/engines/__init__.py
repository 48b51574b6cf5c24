"""Start and end the processes of a cell, in the environment that it asks for."""
