"""The parts of the kvstore-like strategies: arrays in buckets, buckets in shared memory, servers that sum and update.

layout     which parts of which gradients travel together, and to which server
bucketed   a strategy that starts the exchange of a bucket while backward still runs
memory     shared memory with its control block; streams: copies and flags that a GPU writes and waits for
sums       sums and updates by threads on the CPU
serving    the server: waits for gradients, updates, hands weights out; in a rank's thread or a process of its own
mailboxes  the strategy whose workers push gradients to servers and pull weights
"""
