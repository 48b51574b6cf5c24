"""What an agent does on its host without torch: processes, samples, network and scratch files."""
