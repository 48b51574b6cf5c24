"""The parts of the kvstore-like strategies: arrays in buckets, buckets in shared memory, servers that sum and update.

buckets         which parts of which gradients travel together, and to which server
bucketed        a strategy that starts the exchange of a bucket while backward still runs
sharding        buckets that collectives move, a share for each rank
push_pull       the strategy whose workers push gradients to servers and pull weights
worker          a worker's side of that
remote          … where a worker and a server are on different hosts: messages
references      what simpler operations on the same bytes take
server          waits for gradients, updates, sends weights; in a rank's thread or a process of its own (server_process)
shared_regions  the memory that workers and servers share, with its control block
across_hosts    servers of several hosts that keep the same weights
cuda_copies     copies and flags that a GPU's streams write and wait for
cpu_sums        sums and updates by threads on the CPU
"""
