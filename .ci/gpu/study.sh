#!/usr/bin/env bash
# One study of GPUs in one call of at most 600 s: .ci/gpu/study.sh NAME [FOLDER]. README.md beside it says how it is used.
# Without NAME the names are printed. Each function study_NAME says what it measures, on how many GPUs, for how long, and which table
# of RESULTS.md it fills.
#   FOLDER          the folder of results ($out); outputs/gpu where there is none
#   SMALL=1         CPU workers, a small network, short windows: to try a study before it costs time on GPUs
#   SHOW=1          print the commands, run nothing
#   BUDGET          seconds after which no step runs on, so that what was measured is packed before a call of 600 s ends
#   PYTHON          the Python that has what Ringside needs
#   N               GPUs of the studies x8_…: 8, or 4; every study's name says how many
set -u

# ---- Studies of one or two GPUs ----

study_tests() {
  # The tests that need two GPUs and were changed without having been seen there. 2 GPUs, 6 minutes.
  # Fills nothing: a failure is a fault of the code or of the test, to be mended before any figure is taken.
  gpu_tests() {  # SECONDS NAME MARKS FILE
    local only=()
    if [ "${SMALL:-}" ]; then only=(--collect-only -q); fi
    step "$1" "$2" "$PYTHON" -m pytest -n 0 --tb=short "${only[@]}" -m "$3" "tests/$4"
  }
  LINES_SHOWN=45
  gpu_tests 200 graphs multi_gpu test_graphs.py
  gpu_tests 240 calibration multi_gpu test_calibration.py
  gpu_tests 150 fastest gpu test_fastest.py
  gpu_tests 300 far_gpus multi_gpu test_far_gpus.py
  gpu_tests 150 graphs_on_one gpu test_graphs.py
}

study_seconds() {
  # What a cell costs: its ranks (of an older commit too, if OLD is a checkout of it), compiled code new and from the cache, and the
  # sweep's own seconds. 2 GPUs, 8.5 minutes; with OLD the last sweeps may be left out.
  # Fills a table of seconds. Only the first sweep finds an empty store, as a user's first one does: run it into a new folder.
  local two compiled study
  two=(gpus=0,1 "model=$model" strategy=nccl_allreduce,kvstore_device "batch_size=$(small 256,128 16,8)" "${timing[@]}"
    noise_pairs=0)
  sweep 170 template "${two[@]}" nccl.algo=null,Ring
  if [ "${OLD:-}" ]; then
    with_old sweep 110 old gpus=0,1 "model=$model" "batch_size=$(small 256,128 16,8)" "${timing[@]}" noise_pairs=0
  fi
  compiled=(gpus=0,1 "model=$model" "optimize=$compile" "${timing[@]}" noise_pairs=0)
  sweep 170 compiled_new "${compiled[@]}"
  sweep 120 compiled_cached "${compiled[@]}" nccl.algo=null,Ring
  sweep 80 levels gpus=0,1 "model=$model" "${timing[@]}" nccl.p2p_level=null,LOC
  for study in template old compiled_new compiled_cached levels; do
    if [ -d "$out/$study" ]; then analysis "seconds_$study" seconds "$out/$study"; fi
  done
}

study_graphs() {
  # Steps as CUDA graphs beside eager ones, by batch size, on one GPU and on two. 2 GPUs, 3 minutes for each of MODELS.
  # Fills "CUDA graphs", the columns eager and graph. Copy $out/graphs_MODEL, packed, to tests/data/h200_x2.
  local network
  for network in $(small "${MODELS:-resnet50 inception_v3}" fmnist_cnn); do
    cells 270 "graphs_$network" 'gpus=[0],[0,1]' "model=$network" "optimize=eager,$graph" \
      "batch_size=$(small 256,128,64,32,16 16,8)" "${second[@]}" noise_pairs=0
  done
}

study_compiled() {
  # Compiled steps, and the same as CUDA graphs, by batch size, on two GPUs and on one. 2 GPUs, 8 minutes for ResNet-50: the code is made
  # before, all batch sizes side by side (1.5 minutes), then a cell takes 20 s. MODEL and BATCHES choose. Inception-v3 takes longer
  # (2.5 minutes, then 30 s): GPUS="0,1" leaves one GPU alone out.
  # Fills "CUDA graphs", the columns compile and compile_graph, and "Scaling", Inception-v3 compiled on two GPUs.
  local batches commas gpus study
  compiled_in_out
  batches=${BATCHES:-$(small 256,128,64,32,16 16,8)}
  OPTIMIZE=$compile step 200 before bash "$script" compile_before "$out" "$model" ${batches//,/ }
  for gpus in ${GPUS:-0,1 0}; do
    commas=${gpus//[^,]/}
    study=compiled_${model}_$((${#commas} + 1))
    cells 420 "$study" "gpus=$gpus" "model=$model" "optimize=$compile,$(small compile_graph eager)" "batch_size=$batches" \
      "${second[@]}" noise_pairs=0
  done
}

study_rehearsal() {
  # Eight GPUs rehearsed on one, with NCCL 2.30 (README.md): a script, observed and as a cell, traces, collectives; three planted
  # troubles, which must be found; hooks, shards, sizes, graphs and every strategy. 1 GPU, 9 minutes.
  # Fills nothing: a run that would fail on real GPUs is a fault to be mended. No number of it is a rate.
  local little brief=("engine.start_timeout_s=$(small 90 40)" "engine.silence_timeout_s=$(small 45 40)")
  local script=$PWD/tests/data/own_code/src/ddp.py
  little=("${brief[@]}" "model=$(small resnet18 fmnist_cnn)" "batch_size=$(small 64 16)")
  LINES_SHOWN=45 step 60 observe "$PYTHON" -m launch observe -- "$PYTHON" -m torch.distributed.run --nproc-per-node 2 "$script"
  cells 60 script gpus=0,1 rehearse=2 benchmark=script "benchmark.run=[$script]" profiler=torch "${brief[@]}"
  cells 90 script_nsys gpus=0,1 rehearse=2 benchmark=script "benchmark.run=[$script]" "profiler=$(small nsys torch)" "${brief[@]}"
  cells 60 traced gpus=0,1 rehearse=2 profiler=torch "${little[@]}"
  cells 90 traced_nsys gpus=0,1 rehearse=2 "profiler=$(small nsys torch)" "${little[@]}"
  cells 60 collectives "gpus=$sizes" rehearse=8 benchmark=collectives benchmark.collective=all_reduce,all_to_all "${brief[@]}"
  cells 60 planted_setting gpus=0,1 rehearse=2 strategy=nccl_allreduce nccl.socket_ifname=null,nothing0 "${little[@]}"
  cells 75 planted_hang --config-dir "$PWD/tests/data/own_code/conf" 'gpus=[0,1],[0,1,2,3]' rehearse=4 strategy=forgets \
    "model=$(small resnet18 fmnist_cnn)" engine.start_timeout_s=30 engine.silence_timeout_s=10
  cells 75 planted_large gpus=all rehearse=8 "model=$model" strategy=nccl_allreduce "batch_size=$(small 16384 1000000)" "${brief[@]}"
  cells 60 hooks gpus=0,1 rehearse=2 strategy=nccl_allreduce strategy.comm_hook=fp16,bf16 "${little[@]}"
  cells 100 shards 'gpus=[0,1,2,3]' rehearse=4 "strategy=$(small fsdp,zero1,zero2,local_sgd local_sgd)" "${little[@]}"
  cells 150 sizes "gpus=$sizes" rehearse=8 strategy=nccl_allreduce,kvstore_device "optimize=eager,$graph" "${little[@]}"
  sweep 200 strategies +experiment=strategies "gpus=$(small '[all]' '[0,1]')" "rehearse=$(small 8 2)" "model=$model" "${brief[@]}"
}

study_shared_gpu() {
  # The tests of two GPUs that judge no speed, on one GPU with NCCL 2.30 (README.md), with nothing beside them. 1 GPU, 7 minutes.
  # Fills nothing: a failure is a fault of the code or of the test.
  shared() {  # SECONDS NAME PROCESSES FILE...
    local seconds=$1 title=$2 processes=$3 only=()
    shift 3
    if [ "${SMALL:-}" ]; then only=(--collect-only -q); fi
    step "$seconds" "$title" "$PYTHON" -m pytest -n "$processes" --tb=short --timeout=240 --durations=12 --shared-gpu -m multi_gpu \
      "${only[@]}" "$@"
  }
  LINES_SHOWN=45
  # A file a process: four tests of far GPUs at once were 36 processes, and 139 GiB were too little for their kernels.
  shared 380 tests 3 tests/test_far_gpus.py tests/test_collectives.py tests/test_jacobi.py tests/test_registered_memory.py
  # Alone, since one of its faults takes all memory of the GPU.
  shared 230 faults 0 tests/test_faults_gpu.py
}

study_today() {
  # Shards, micro-steps, hooks and local SGD beside DDP. 2 GPUs, 9 minutes; GPUS=0: one, 5 minutes.
  # Fills a table of rates, costs and memory by strategy. Copy $out/shards, …, packed, to tests/data/h200_x2.
  local common=("gpus=${GPUS:-0,1}" "model=$model" "batch_size=$(small 256 16)" "${timing[@]}" noise_pairs=0
    "repeats=$(small 2 1)")
  cells 170 shards "${common[@]}" "strategy=nccl_allreduce,zero1$(small ,zero2,fsdp "")" predict=auto
  cells 100 micro_steps "${common[@]}" "strategy=nccl_allreduce$(small ,fsdp "")" accumulate=4
  cells 110 hooks "${common[@]}" strategy=nccl_allreduce "strategy.comm_hook=none,bf16,fp8"
  cells 140 rarer "${common[@]}" strategy=nccl_allreduce,local_sgd "$(small nccl.p2p_level=null,LOC seed=1)"
}

study_asked() {
  # A question beside the grid that would answer it: the fastest strategy of seven. 2 GPUs, 9 minutes.
  # Fills a table of answers and seconds. Copy $out/asked and $out/grid, packed, to tests/data/h200_x2.
  local common=(gpus=0,1 "model=$model" "batch_size=$(small 256 16)" "${timing[@]}" noise_pairs=0
    "strategy=nccl_allreduce,kvstore_device,cpu_staged,kvstore_dist_sync,kvstore_local$(small ,zero2,fsdp "")")
  LINES_SHOWN=30
  sweep 170 asked "${common[@]}" ask=fastest margin=1%
  cells 440 grid "${common[@]}" "repeats=$(small 5 2)"
}

study_scripts() {
  # A script beside Ringside's own training of the same model, on one GPU and on two; its levels; traced; observed, too with a slow
  # rank and without peer access. REFERENCE: torchvision's references/classification, which read 100,000 small JPEGs. 2 GPUs, 7 minutes.
  # Fills "Scripts". Copy $out/script, …, packed, to tests/data/h200_x2.
  local run=tests/data/own_code/src/resnet50.py both='gpus=[0],[0,1]' brief jpegs=$out/.jpegs reference
  brief=(benchmark=script benchmark.max_seconds=$(small 6 2) "benchmark.warmup_min_seconds=$(small 2 0)" noise_pairs=0)
  cells 60 model "$both" "model=$(small resnet50 fmnist_cnn)" "${timing[@]}" noise_pairs=0
  cells 80 script "$both" "${brief[@]}" "benchmark.run=$run $(small 256 2)"
  if [ -z "${SMALL:-}" ]; then
    cells 60 script_levels gpus=0,1 "${brief[@]}" "benchmark.run=$run" nccl.p2p_level=LOC,PIX
  fi
  cells 150 script_traced gpus=0,1 "${brief[@]}" "benchmark.run=$run $(small 256 2)" "profiler=$(small nsys torch)"
  if [ "${REFERENCE:-}" ]; then
    make_jpegs "$jpegs"
    reference="$REFERENCE/train.py --data-path $jpegs --model $(small resnet50 resnet18) --batch-size $(small 256 4) --workers $(small 15 1)"
    reference+=" --device $(small cuda cpu) --channels-last $(small --amp "")"
    cells 100 reference "$both" "${brief[@]}" "benchmark.run=$reference"
  fi
  local watch=("$PYTHON" -m launch observe --output-dir "$out" -- "$PYTHON" -m torch.distributed.run --nproc-per-node 2
    "$run" "$(small 256 2)")
  step 60 observed "${watch[@]}" "$(small 150 8)"
  step 60 observed_slow "${watch[@]}" "$(small 150 8)" 1
  NCCL_P2P_LEVEL=LOC step 60 observed_loc "${watch[@]}" "$(small 150 8)"
}

study_tuned() {
  # NCCL's settings searched, with and without peer access, beside a grid of all of them. CHANNELS=null,4,16: their limit too, for
  # which one call is too short. 2 GPUs, 9 minutes; CPU workers have none.
  # Fills a row of "Questions". $out/tuned is tests/data/tuned_nccl.tar.xz.
  local common=(gpus=0,1 "nccl.max_nchannels=${CHANNELS:-null}")
  LINES_SHOWN=30
  sweep 220 tuned tune=nccl "${common[@]}" "model=$model" "${timing[@]}"
  sweep 220 tuned_loc tune=nccl "${common[@]}" "model=$model" "${timing[@]}" nccl.p2p_level=LOC
  cells 200 tune_grid "${common[@]}" benchmark=collectives benchmark.{min_bytes=64K,max_bytes=256M,factor=16} repeats=3 \
    nccl.algo=null,allreduce:tree,Ring nccl.proto=null,LL,LL128,Simple
}

study_strangers() {
  # Every strategy alone, and with another program that takes a tenth of GPU 0 from the first timed step on. 2 GPUs, 8 minutes.
  # Fills "Another program". $out/alone and $out/strangers (there `beside`) are tests/data/strangers.tar.xz.
  local strategies common watcher
  strategies=none,nccl_allreduce,kvstore_device,cpu_staged,kvstore_local,kvstore_dist_sync,kvstore_dist_async,hierarchical
  strategies+=,local_sgd$(small ,zero1,zero2,fsdp "")
  common=(gpus=0,1 "model=$model" "batch_size=$(small 256 16)" "strategy=$strategies" noise_pairs=0
    "benchmark.max_seconds=$(small 4 0.3)" benchmark.exposed_rounds=1 "${short[@]}")
  cells 240 alone "${common[@]}"
  if [ -z "${SMALL:-}${SHOW:-}" ]; then
    "$PYTHON" .ci/gpu/stranger.py "$out/strangers" &
    watcher=$!
  fi
  cells 290 strangers "${common[@]}"
  [ -z "${watcher:-}" ] || kill "$watcher"
}

study_observed() {
  # What observing costs a step: with torch's timing of collectives, without it, and as a cell, in turn. 2 GPUs, 5 minutes.
  # Fills benchmarks/script/README.md.
  local run=tests/data/own_code/src/resnet50.py turn timed
  for turn in 1 2 3; do
    for timed in 1 0; do
      TORCH_NCCL_ENABLE_TIMING=$timed step 50 "observed_${timed}_$turn" "$PYTHON" -m launch observe --output-dir "$out" -- "$PYTHON" \
        -m torch.distributed.run --nproc-per-node 2 "$run" $(small "256 150" "2 40")
    done
    cells 50 "cell_$turn" gpus=0,1 benchmark=script "benchmark.run=$run $(small 256 2)" noise_pairs=0 \
      benchmark.max_seconds=$(small 6 2) "benchmark.warmup_min_seconds=$(small 2 0)"
  done
}

study_rewritten() {
  # Which way to run a step is fastest: a question beside a grid, with the code compiled before. 1 GPU, 10 minutes.
  # Fills "Questions". Copy $out/asked_way and $out/grid, packed, to tests/data/h200_x1.
  local common=(gpus=0 "model=$model" "batch_size=$(small 256 16)" "${timing[@]}" noise_pairs=0)
  local ways="optimize=$(small eager,graph,compile,compile_graph,max eager,compile)"
  compiled_in_out
  LINES_SHOWN=30
  cells 170 before "${common[@]}" "optimize=$(small compile,compile_graph,max compile)"
  sweep 330 asked_way "${common[@]}" "$ways" ask=fastest margin=1%
  cells 400 grid "${common[@]}" "$ways" repeats=3
}

study_formats() {
  # Whether a layout and TF32 gain, on two models: four questions of two candidates, and the grids of the first. 1 GPU, 9.5 minutes.
  # Fills "Questions". Copy $out/asked_layout_MODEL, $out/layout_grid, …, packed, to tests/data/h200_x1.
  local network common layout format
  LINES_SHOWN=14
  # The first step in fp32 is slow at larger batches: cuDNN tried its algorithms for 55 s at 256.
  layout=(channels_last=true,false "batch_size=$(small 256 16)")
  format=("precision=$(small fp32,tf32 fp32,bf16)" "batch_size=$(small 64 16)")
  common=(gpus=0 "${timing[@]}" noise_pairs=0)
  for network in $(small "resnet50 inception_v3" fmnist_cnn); do
    sweep 110 "asked_layout_$network" "${common[@]}" "model=$network" "${layout[@]}" ask=differs margin=1%
    sweep 130 "asked_precision_$network" "${common[@]}" "model=$network" "${format[@]}" ask=differs margin=1%
  done
  cells 130 layout_grid "${common[@]}" "model=$model" "${layout[@]}" repeats=3
  cells 130 precision_grid "${common[@]}" "model=$model" "${format[@]}" repeats=3
}

study_strong_scaling() {
  # A fixed global batch on one GPU, on the other, and on both, each step one replay of a CUDA graph; three runs. 2 GPUs, 3 minutes.
  # Fills "CUDA graphs", strong scaling: a verdict for each number of GPUs. Copy $out/strong_scaling, packed, to tests/data/h200_x2.
  local options=(+experiment=strong_scaling 'gpus=[0],[1],[0,1]' "model=$model" "optimize=$graph" "${timing[@]}")
  if [ "${SMALL:-}" ]; then options+=(full=true repeats=1 global_batch_size=32); fi
  sweep 400 strong_scaling "${options[@]}"
}

study_fastest() {
  # The way to the fastest rate: what each rewrite of optimize=max gains alone, in turns in one process (gains.py, 6 minutes, most of it
  # compiling), then a cell of max_graph and one of compile (2 minutes). 1 GPU.
  # Fills "The fastest rate": the table of gains, the kernels that take longest, the best rate.
  LINES_SHOWN=60
  step 420 gains "$PYTHON" .ci/gpu/gains.py "$out" "model=$model" "precision=$weights" "batch_size=$(small 512 16)" "${on_cpu[@]}"
  cells 160 fastest gpus=0 "model=$model" "optimize=$(small max_graph eager),$compile" "precision=$weights" \
    "batch_size=$(small 1024 16)" "$(small benchmark.max_seconds=5 benchmark.max_seconds=0.3)" benchmark.exposed_rounds=1 \
    "${short[@]}" noise_pairs=0
}

study_exchanges() {
  # Exchanges alone and in a step: sizes of buckets, every strategy, half precision, a server with a GPU of its own. 2 GPUs, 7.5
  # minutes; the same exchanges of an older commit too, if OLD is a checkout of it (2 minutes more: BUCKETS=no leaves sizes out).
  # Fills "The exchange alone" (sizes of buckets too) and "Strategies on two GPUs".
  local alone strategies runs
  runs=$(small repeats=2 repeats=1)
  alone=(benchmark=exchange "model=$model")
  if [ "${SMALL:-}" ]; then alone+=(benchmark.iterations=2 benchmark.limit_iterations=2); fi
  strategies=strategy=nccl_allreduce,kvstore_device,cpu_staged,kvstore_dist_sync,kvstore_dist_async
  cells 190 exchange gpus=0,1 "${alone[@]}" "$strategies" "$runs"
  if [ "${OLD:-}" ]; then
    with_old cells 190 exchange_old gpus=0,1 "${alone[@]}" "$strategies" "$runs"
  fi
  cells 60 exchange_fp16 gpus=0,1 "${alone[@]}" strategy=nccl_allreduce,kvstore_device strategy.comm_hook=fp16
  cells 50 exchange_sharded gpus=0,1 "${alone[@]}" strategy=cpu_staged strategy.staging=sharded
  cells 70 exchange_server gpus=0 "${alone[@]}" strategy=kvstore_dist_sync_device,kvstore_dist_async_device strategy.server_gpus=1
  if [ "${BUCKETS:-yes}" = yes ]; then
    cells 190 buckets gpus=0,1 "model=$model" "strategy.bucket_cap_mb=$(small 5,10,25,50,100,200 1,25)" "${timing[@]}" "$runs"
  fi
  cells 110 staged gpus=0,1 "model=$model" strategy=cpu_staged,kvstore_dist_sync,kvstore_dist_async "${timing[@]}"
}

study_forecasts() {
  # A blind test of forecasts: 14 cells that calibrate, then cells of other batch sizes, transports, sizes of buckets, hooks and another
  # model, each forecast before its ranks start. 2 GPUs, 9 minutes.
  # Fills "Forecasts". Copy $out/forecasts, packed, to tests/data/h200_x2; predict_*.txt have the tables.
  local brief held both=strategy=nccl_allreduce,kvstore_device
  brief=(predict=auto noise_pairs=0 "$(small benchmark.max_seconds=0.6 benchmark.max_seconds=0.3)"
    benchmark.exposed_rounds=1 "${short[@]}")
  forecast() { cells "$@" study=forecasts "${brief[@]}"; }  # all of one study, so that each sweep knows those before
  # What the others are forecast from: 12 + 2 cells.
  forecast 190 calibration 'gpus=[0],[0,1]' "model=$model" strategy=none,nccl_allreduce,kvstore_device "batch_size=$(small 256,128 32,16)"
  forecast 70 transport gpus=0,1 "model=$model" "$both" nccl.p2p_level=LOC "batch_size=$(small 256 32)"
  # What is forecast: 16 + 6 + 4 + 2 + 4.
  forecast 180 batches gpus=0,1 "model=$model" "$both" "batch_size=$(small 288,224,208,192,176,160,144,112 24,20)"
  if [ -z "${SMALL:-}" ]; then
    forecast 100 far_batches gpus=0,1 "model=$model" "$both" nccl.p2p_level=LOC batch_size=224,192,160
    forecast 90 sizes_of_buckets gpus=0,1 "model=$model" "$both" strategy.bucket_cap_mb=10,50 batch_size=256
    forecast 70 hooks gpus=0,1 "model=$model" "$both" strategy.comm_hook=bf16 batch_size=256
    forecast 100 another_model 'gpus=[0],[0,1]' model=inception_v3 "$both" batch_size=128
  fi
  for held in condition batch transport model; do
    analysis "predict_$held" predict "$out/forecasts" --holdout "$held"
  done
}

# ---- Studies of eight GPUs (N=4: four) ----

study_x8_waterfall() {
  # Where the rate goes: all GPUs and each alone, with the strategy and without. 8 minutes with two runs; REPEATS=3 fits a call only on
  # four.
  # Fills "Scaling" and "Where the rate goes". Copy $out/waterfall_x8, packed, to tests/data/h200_x8/waterfall.
  sweep 560 "waterfall_x$N" "gpus=[$all]" "model=$model" waterfall=true "repeats=${REPEATS:-$(small 2 1)}" "${second[@]}"
}

study_x8_scaling() {
  # Weak scaling over 1, 2, 4 and 8 GPUs, eager, ResNet-50 and Inception-v3 (MODELS), each GPU alone too. 5.5 minutes.
  # Fills "Scaling": efficiency against the slowest member. Copy $out/scaling_x8_MODEL, packed, to tests/data/h200_x8.
  local network
  for network in $(small "${MODELS:-resnet50 inception_v3}" fmnist_cnn); do
    cells 280 "scaling_x${N}_$network" "gpus=$each,$scale" "model=$network" "${timing[@]}" noise_pairs=0
  done
}

study_x8_compiled() {
  # Weak scaling over 1, 2, 4 and 8 GPUs, compiled, each GPU alone too. 7.5 minutes for ResNet-50: code is new where a rank has a GPU
  # that had none. MODEL chooses; for Inception-v3 ALONE=0 measures GPU 0 alone only.
  # Fills "Scaling": compiled, and at equal clocks. Copy $out/compiled_x8_MODEL, packed, to tests/data/h200_x8.
  local alone=${ALONE:+[0]}
  cells 560 "compiled_x${N}_$model" "gpus=${alone:-$each},$scale" "model=$model" "optimize=$compile" "${timing[@]}" noise_pairs=0
}

study_x8_settings() {
  # The command that Ringside was made for, its levels, the classes of subsets, the best and the worst half, and a trace of all ranks.
  # 5 minutes.
  # Fills "NCCL settings", "Traces" and a table of classes. Copy $out/settings_x8, …, packed, to tests/data/h200_x8.
  local pair
  pair=gpus=$(small 0,3 0,1)
  sweep 60 "command_x$N" "$pair" "model=$model" nccl.p2p_level=LOC "${timing[@]}"
  cells 90 "settings_x$N" "$pair" "model=$model" nccl.p2p_level=null,NVL,PIX,LOC "${timing[@]}" noise_pairs=0
  if [ -z "${SMALL:-}" ]; then
    cells 60 "best_x$N" "gpus=best:$((N / 2)),worst:$((N / 2))" "model=$model" "${windows[@]}" noise_pairs=0
    cells 160 "classes_x$N" gpus=classes "model=$model" "${windows[@]}" noise_pairs=0
  fi
  sweep 110 "trace_x$N" "gpus=[$all]" "model=$model" "profiler=$(small auto torch)" "${timing[@]}"
}

study_x8_strategies() {
  # Every strategy on all GPUs, two runs each. 5.5 minutes.
  # Fills "Strategies on eight GPUs". Copy $out/strategies_x8, packed, to tests/data/h200_x8/strategies.
  local options
  options=(+experiment=strategies "gpus=[$all]" "model=$model" "repeats=${REPEATS:-$(small 2 1)}" "${timing[@]}")
  if [ "${SMALL:-}" ]; then options+=(full=true strategy=none,cpu_staged); fi
  cells 560 "strategies_x$N" "${options[@]}"
}

study_x8_servers() {
  # Servers on GPUs of their own (7 + 1, 6 + 2, 4 + 1; N=4: 3 + 1, 2 + 2, 2 + 1), and the exchange of every strategy alone. 4.5 minutes.
  # Fills "Strategies on eight GPUs" and "The exchange alone". Copy $out/servers_x8, $out/exchange_x8, packed, to tests/data/h200_x8.
  local options on_gpus
  first() { seq -s , 0 $(($1 - 1)); }  # NUMBER: so many GPUs
  options=("model=$model" "${timing[@]}" study="servers_x$N" noise_pairs=0)
  if [ -z "${SMALL:-}" ]; then
    on_gpus=strategy=kvstore_dist_sync_device,kvstore_dist_async_device
    cells 90 one_server "gpus=[$(first $((N - 1)))]" "$on_gpus" "strategy.server_gpus=$((N - 1))" "${options[@]}"
    cells 90 two_servers "gpus=[$(first $((N - 2)))]" "$on_gpus" strategy.servers=2 \
      "strategy.server_gpus=$((N - 2))+$((N - 1))" "${options[@]}"
    cells 60 few_workers "gpus=[$halves]" strategy=kvstore_dist_async_device "strategy.server_gpus=$((N - 1))" "${options[@]}"
  fi
  cells 240 "exchange_x$N" "gpus=[$all]" benchmark=exchange "model=$model" \
    strategy=nccl_allreduce,kvstore_device,cpu_staged,kvstore_dist_sync,kvstore_dist_async,kvstore_dist_sync_device,kvstore_dist_async_device
}

study_x8_collectives() {
  # Four collectives from 256 B to 4 GiB on 2, 4 and 8 GPUs (N=4: from 64 B, which eight cannot share in an all-gather), and nccl-tests
  # beside them if NCCL_TESTS is the folder of its programs, built against the NCCL that torch has. 3 minutes, 6 with nccl-tests.
  # Fills "Links". Copy $out/collectives_x8, packed, to tests/data/h200_x8/links, and nccl_tests_*.txt to tests/data.
  local least=$((N > 4 ? 256 : 64)) size program
  cells 330 "collectives_x$N" "gpus=$scale" benchmark=collectives \
    benchmark.collective=all_reduce,all_gather,reduce_scatter,all_to_all "benchmark.min_bytes=$least" "benchmark.max_bytes=$bytes" \
    benchmark.factor=4 sample_gpus=false
  if [ "${NCCL_TESTS:-}" ]; then
    for ((size = 2; size <= N; size *= 2)); do
      for program in all_reduce all_gather reduce_scatter alltoall; do
        step 40 "nccl_tests_${program}_$size" "$NCCL_TESTS/${program}_perf" -b "$least" -e "$bytes" -f 4 -t "$size" -g 1 -n 20 -w 5
      done
    done
  fi
}

study_x8_copies() {
  # Copies between all pairs of GPUs, alone and at once, and the links to the host from one GPU to all. 3 minutes. P2P_TEST may name
  # p2pBandwidthLatencyTest of the CUDA samples, which then runs in the same call.
  # Fills "Links". Copy $out/p2p_x8, $out/host_link_x8, packed, to tests/data/h200_x8/links.
  local less=(benchmark.repeats=5)
  if [ "${SMALL:-}" ]; then less=(benchmark.repeats=1 benchmark.bytes=1000000); fi
  cells 300 "p2p_x$N" "gpus=[$all]" benchmark=p2p benchmark.concurrent=true "${less[@]}"
  if [ "${P2P_TEST:-}" ]; then step 60 p2p_tool "$P2P_TEST"; fi
  cells 150 "host_link_x$N" "gpus=[0],$scale" benchmark=host_link
}

study_x8_forecasts() {
  # Forecasts of four and eight GPUs (N=4: three and four), written down before they run, from cells on one and two. 6.5 minutes.
  # Fills "Forecasts", by size. Copy $out/forecasts_x8, packed, to tests/data/h200_x8/forecasts.
  local brief sizes="[$halves],[$all]" both=strategy=nccl_allreduce,kvstore_device
  brief=(predict=auto noise_pairs=0 "$(small benchmark.max_seconds=0.6 benchmark.max_seconds=0.3)"
    benchmark.exposed_rounds=1 "${short[@]}" study="forecasts_x$N")
  if [ "$N" = 4 ]; then sizes="[0,1,2],[$all]"; fi
  cells 150 calibration 'gpus=[0],[0,1]' "model=$model" strategy=none,nccl_allreduce,kvstore_device \
    "batch_size=$(small 256,128 16,8)" "${brief[@]}"
  cells 110 alone "gpus=${each#*,}" "model=$model" "batch_size=$(small 256 16)" "${brief[@]}"
  cells 60 transport gpus=0,1 "model=$model" nccl.p2p_level=LOC "batch_size=$(small 256 16)" "${brief[@]}"
  if [ -z "${SMALL:-}" ]; then
    cells 170 sizes "gpus=$sizes" "model=$model" "$both" batch_size=256,192,128 "${brief[@]}"
    cells 80 far_sizes "gpus=$sizes" "model=$model" nccl.p2p_level=LOC batch_size=256 "${brief[@]}"
  fi
  analysis predict_size predict "$out/forecasts_x$N" --holdout size
}

# ---- What the studies are made of ----

small() {  # LARGE SMALL: the value for GPUs, or the one for SMALL=1
  if [ "${SMALL:-}" ]; then echo "$2"; else echo "$1"; fi
}

make_jpegs() {  # FOLDER: an image folder of 100 classes that share 1,000 JPEGs of 64×64 pixels
  [ -z "${SHOW:-}" ] || return 0
  "$PYTHON" - "$1" <<'END'
import pathlib, sys
import numpy, PIL.Image
folder = pathlib.Path(sys.argv[1])
one = folder / "one"
one.mkdir(parents=True, exist_ok=True)
draw = numpy.random.default_rng(1)
for index in range(1000):
    coarse = PIL.Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=numpy.uint8))
    coarse.resize((64, 64)).save(one / f"{index}.jpg")
for part in ("train", "val"):
    (folder / part).mkdir(exist_ok=True)
    for number in range(100):
        (folder / part / f"{number}").symlink_to(one)
END
}

compiled_in_out() {  # keep compiled code in $out, where no earlier study left any
  export TORCHINDUCTOR_CACHE_DIR=$out/.compiled TRITON_CACHE_DIR=$out/.compiled/triton
  [ "${SHOW:-}" ] || mkdir -p -m 700 "$out/.compiled"
}

step() {  # SECONDS NAME COMMAND...: run a command for so many seconds at most. Its output is in $out/NAME.txt, its end is shown
  local seconds=$1 output=$out/$2.txt title=$2 status began=$SECONDS
  shift 2
  if [ "${SHOW:-}" ]; then
    echo "${*@Q}"
    return
  fi
  [ "$seconds" -le $((BUDGET - SECONDS)) ] || seconds=$((BUDGET - SECONDS))
  if [ "$seconds" -lt 10 ]; then
    echo "=== $(date -u '+%F %T') $title: left out, $SECONDS of $BUDGET s are gone"
    return
  fi
  echo "=== $(date -u '+%F %T') $title: $* (at most $seconds s)"
  mkdir -p "$out"
  timeout -s INT -k 20 "$seconds" "$@" > "$output" 2>&1
  status=$?
  tail -n "${LINES_SHOWN:-25}" "$output" | cut -c 1-220
  echo "--- $title: status $status after $((SECONDS - began)) s"
}

sweep() {  # SECONDS NAME OPTION...: a sweep into $out/NAME, or into the study that an option names, with its report and MLflow run
  local seconds=$1 title=$2 study
  shift 2
  case " $* " in *" study="*) ;; *) set -- "$@" "study=$title" ;; esac
  study="$* "
  study=${study##*study=}
  study=${study%% *}
  case " $* " in *" rehearse="*) study+=-rehearsal ;; esac
  [ "${from[*]}" ] || measured+=("$study")
  step "$seconds" "$title" "${from[@]}" "$PYTHON" launch.py -m "$@" "${on_cpu[@]}" "output_dir=$out"
}

with_old() {  # COMMAND...: the same with the checkout of an older commit, which OLD names
  from=(env -C "$OLD" "PYTHONPATH=$OLD$search_path")
  "$@"
  from=()
}

cells() {  # SECONDS STUDY OPTION...: a sweep without report and MLflow, for figures of cells
  sweep "$@" tracking=none report=false
}

analysis() {  # NAME COMMAND...: what a reader says of the results
  local title=$1
  shift
  step 60 "$title" "$PYTHON" -m analysis "$@"
}

finish() {  # check the samples of the studies, and pack all that was measured into $out/NAME.tar.gz
  local study
  if [ "${SHOW:-}" ]; then return; fi
  BUDGET=$((BUDGET + 25))
  for study in $(printf '%s\n' "${measured[@]}" | sort -u); do
    if [ -d "$out/$study" ]; then analysis "verify_$study" verify "$out/$study" --pack; fi
  done
  # Made beside the folder, which tar would otherwise see change. Traces are large: they have an archive of their own.
  local without=(--exclude=.compiled --exclude=.jpegs --exclude='mlflow.db*' --exclude=mlartifacts --exclude='*.tar.gz')
  tar -czf "$out.$name.tar.gz" -C "$out" "${without[@]}" --exclude=profile .
  mv "$out.$name.tar.gz" "$out/$name.tar.gz"
  if (cd "$out" && find . -name mlartifacts -prune -o -type d -name profile -print0 > "$out/profiles" && [ -s profiles ]); then
    tar -czf "$out/$name.traces.tar.gz" -C "$out" --null -T "$out/profiles"
  fi
  rm "$out/profiles"
  echo "=== $(date -u '+%F %T') $name: $SECONDS s in all, $(du -h "$out/$name.tar.gz" | cut -f 1) in $out/$name.tar.gz"
}

compile_before() {  # FOLDER MODEL BATCH...: compile a model for several batch sizes side by side on GPU 0, for cells that follow
  # On one H200 with 16 cores (2026-11-23) five batch sizes took 89 s for ResNet-50 and 152 s for Inception-v3, where a cell alone takes
  # 45 and over 90. What torch chose by timing kernels is deleted: it was measured beside other programs, and the cells choose again.
  local folder batch logs=$1 network=$2
  shift 2
  folder=$(mktemp -d)
  for batch in "$@"; do
    (
      "$PYTHON" launch.py gpus=0 "model=$network" "optimize=${OPTIMIZE:-compile}" "batch_size=$batch" "output_dir=$folder/$batch" \
        tracking=none report=false noise_pairs=0 benchmark.max_seconds=0.3 benchmark.min_iterations=3 \
        benchmark.warmup_iterations=1 benchmark.warmup_min_seconds=0 benchmark.exposed_rounds=1 benchmark.calibrate=none \
        "${on_cpu[@]}" > "$logs/before-$network-$batch.txt" 2>&1
      echo "$network, batch $batch: status $? after $SECONDS s"
    ) &
  done
  wait
  find "$TORCHINDUCTOR_CACHE_DIR" -name '*.best_config' -delete
  rm -rf "$folder"
}

# ---- The call ----

script=$(realpath "${BASH_SOURCE[0]}")
cd "$(dirname "$script")/../.." || exit 1
BUDGET=${BUDGET:-565}
PYTHON=${PYTHON:-python}
search_path=${PYTHONPATH:+:$PYTHONPATH}
from=()  # the words before a command: none, or those of `with_old`
measured=()  # studies that this call has measured
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD$search_path"
if [ "${SMALL:-}" ]; then
  model=fmnist_cnn graph=eager compile=eager weights=fp32 bytes=64K
  on_cpu=(device=cpu)
  windows=(benchmark.max_seconds=0.3 benchmark.exposed_rounds=1)
  short=(benchmark.min_iterations=3 benchmark.max_iterations=30 benchmark.warmup_iterations=1 benchmark.warmup_min_seconds=0
    benchmark.exchange_iterations=2 benchmark.limit_iterations=0)
else
  model=${MODEL:-resnet50} graph=graph compile=compile weights=bf16_weights bytes=4G
  on_cpu=()
  windows=(benchmark.max_seconds=2 benchmark.exposed_rounds=2)
  short=()
fi
timing=("${windows[@]}" "${short[@]}")
second=("$(small benchmark.max_seconds=1 benchmark.max_seconds=0.3)" benchmark.exposed_rounds=1 "${short[@]}")
if [ "${1:-}" = compile_before ]; then
  "$@"
  exit
fi
if [ "$(type -t "study_${1:-}")" != function ]; then
  echo "usage: .ci/gpu/study.sh NAME [FOLDER]; NAME is one of:" >&2
  compgen -A function study_ | sed 's/^study_//'
  exit 2
fi
name=$1
out=$(realpath -m "${2:-outputs/gpu}")
N=${N:-$(small 8 2)}
all=$(seq -s , 0 $((N - 1)))
halves=$(seq -s , 0 $((N / 2 - 1)))
each=$(seq 0 $((N - 1)) | sed 's/.*/[&]/' | paste -sd ,)
sizes="$(small '[0,1],[0,1,2,3],[0,1,2,3,4,5,6,7]' '[0,1]')"
scale='[0,1]'  # 2, 4, … all: one GPU alone is in $each
for ((size = 4; size <= N; size *= 2)); do scale+=",[$(seq -s , 0 $((size - 1)))]"; done
if [ -z "${SHOW:-}" ]; then
  mkdir -p "$out"
  commit=$(git rev-parse --short HEAD 2> /dev/null || echo unknown)
  echo "=== $(date -u '+%F %T') $name, commit $commit, load $(cut -d ' ' -f 1-3 /proc/loadavg)"
  nvidia-smi --query-gpu=index,name,driver_version,memory.used,utilization.gpu,clocks.sm --format=csv,noheader 2> /dev/null ||
    echo "no NVIDIA driver answers"
fi
"study_$name"
finish
