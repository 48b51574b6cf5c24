"""The kvstore-like strategies: arrays in buckets, and servers that sum and update.

buckets           which parts of which gradients travel together, and to which server
bucketed          a strategy that starts the exchange of a bucket while backward still runs
staging           the strategies whose workers push gradients to servers and pull weights
push_pull_worker  a worker's side of that
server            waits for gradients, updates, sends weights: in a rank, or a server_process
shared_memory     the memory that workers and servers of a host share, with its control block
remote            messages between a worker and a server on different hosts
wires             the connections on which they travel
"""
