"""MXNet's kvstore=dist_async_device: parameter servers of their own processes, on GPUs; every push is applied when it arrives."""

from trainers.kvstore.push_pull import AsynchronousServers

STRATEGY = AsynchronousServers
