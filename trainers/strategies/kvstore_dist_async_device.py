"""MXNet's kvstore=dist_async_device: parameter servers of their own processes, on GPUs; every push is applied when it arrives."""

import functools

from trainers.kvstore.push_pull import Mailboxes

STRATEGY = functools.partial(Mailboxes, synchronous=False, threads=1)
