"""MXNet's kvstore=dist_sync: parameter servers of their own processes, in host memory; every update waits for all workers."""

from trainers.kvstore.push_pull import SynchronousServers

STRATEGY = SynchronousServers
