"""benchmark=host_link: copies between a GPU and the host's memory, and what that memory allows."""
