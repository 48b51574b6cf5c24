"""MXNet's kvstore=dist_async: parameter servers of their own processes, in host memory; every push is applied when it arrives."""

from trainers.kvstore.push_pull import AsynchronousServers

STRATEGY = AsynchronousServers
