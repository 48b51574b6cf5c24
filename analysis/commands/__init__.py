"""The commands of `python -m analysis`, one file each."""
