"""MXNet's kvstore=dist_sync_device: parameter servers of their own processes, on GPUs; every update waits for all workers."""

from trainers.kvstore.push_pull import SynchronousServers

STRATEGY = SynchronousServers
