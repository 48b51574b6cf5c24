"""Untimed steps and collectives after everything else of a training cell: what a forecast of other cells needs.

`benchmark.calibrate` says how much: `none`; `timeline`, a few steps (what `auto` means); `all`. METHOD.md, "Calibration".
Every time is in ms and, of a step, after that step's start on the device's clock of its rank. A spread is the distance between
the quartiles. `tables` of a record hold these, each only where its lines are there; `rows` may be empty, and `unknown` says why:

`all` takes about ALL_MS at most: steps beside collectives are left out where there is no time for enough of them, then the
timeline, and the collective above all buckets.

buckets          {rows, unknown?}: one row a bucket, in the order of exchange; with one rank too.
                 bytes           on the wire, with padding; null: the compression does not say
                 dtype           on the wire: float32, float16, bfloat16, float64
                 gradient_bytes  of the gradients in it, as backward leaves them
                 arrays          parameters that have a part in it
timeline         {rows}: one row a rank and condition, by rank; without exchange first.
                 rank, exchange  exchange: false: without_exchange of the strategy; none has no other
                 steps           that were observed, after a lead-in
                 forward_ms      the loss is there                                        + forward_spread_ms
                 ready_ms        list by bucket: its last gradient is there; null: unknown + ready_spread_ms
                 backward_ms     backward has returned; DDP's waits in it for the exchange + backward_spread_ms
                 exchange_ms     the exchange has ended                                    + exchange_spread_ms
                 update_ms       the weights are there: the whole step                     + update_spread_ms
                 unknown         {field: why}, empty where all is known
bucket_exchange  {rows, operation, unknown?}: one collective alone, as a step has it; the slowest rank of each counts.
                 operation       all_reduce; reduce_scatter + all_gather; reduce + broadcast; …
                 bytes, dtype    on the wire
                 calls           that were timed
                 ms, spread_ms   of one
interference     {rows, operation, unknown?}: steps without exchange, and the same beside collectives that nothing waits for.
                 rank, steps     steps of each kind, in the order A B B A (the two B in one window)
                 bytes, calls    of one collective; collectives beside each step
                 alone_ms        a step without them          + alone_spread_ms
                 beside_ms       a step beside them           + beside_spread_ms
                 comm_alone_ms   those collectives alone: calls × bucket_exchange's ms
                 comm_ms         those collectives beside the step (at most as long as the step)
                 gamma           (beside_ms − alone_ms) ÷ comm_ms: ms that compute takes longer for each ms of communication
                 gamma_error     its standard error, from the scatter of the steps
residuals        {rows, purpose, probabilities}: steps that wait for no other rank, from the windows that every cell has.
                 purpose         of the windows: timed (one rank, or strategy none) or without exchange
                 rank, n         n: steps
                 mean_ms, sd_ms  of them
                 quantiles_ms    of them at `probabilities`
                 acf             autocorrelation at lags 1, 2, …, of pairs inside one window: at most 10; fewer in short windows
"""
