"""Answer questions about the command: its options, what the TAB key completes, commands for this machine."""
