"""What cells were forecast to give: beside what they gave, and over numbers of GPUs."""
