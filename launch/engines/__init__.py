"""How the processes of a cell start and end, and in which environment."""
