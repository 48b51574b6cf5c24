"""What an agent does on its host without torch: find and end processes, sample the machine, hand files on."""
