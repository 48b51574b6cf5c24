# What the scripts of this folder share; each begins with `. "$(dirname "$0")/common.sh"`. README.md beside it says how they are used.
#   first argument  the folder of results ($out); outputs/gpu where there is none
#   SMALL=1         CPU workers, a small network, short windows: to try a script before it costs time on GPUs
#   SHOW=1          print the commands, run nothing
#   BUDGET          seconds after which no step runs on, so that what was measured is packed before a call of 600 s ends
#   PYTHON          the Python that has what Ringside needs
set -u
out=$(realpath -m "${1:-outputs/gpu}")
here=$(realpath "$(dirname "${BASH_SOURCE[0]}")")
cd "$here/../.." || exit 1
name=$(basename "$0" .sh)
BUDGET=${BUDGET:-565}
PYTHON=${PYTHON:-python}
around=${PYTHONPATH:+:$PYTHONPATH}
from=()  # the words before a command: none, or those of `with_old`
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD$around"

if [ "${SMALL:-}" ]; then
  model=fmnist_cnn graph=eager compile=eager weights=fp32 bytes=64K
  one=(device=cpu)
  windows=(benchmark.max_seconds=0.3 benchmark.exposed_rounds=1)
  short=(benchmark.min_iterations=3 benchmark.max_iterations=30 benchmark.warmup_iterations=1 benchmark.warmup_min_seconds=0
    benchmark.exchange_iterations=2 benchmark.limit_iterations=0)
else
  model=${MODEL:-resnet50} graph=graph compile=compile weights=bf16_weights bytes=4G
  one=()
  windows=(benchmark.max_seconds=2 benchmark.exposed_rounds=2)
  short=()
fi

small() {  # LARGE SMALL: the value for GPUs, or the one for SMALL=1
  if [ "${SMALL:-}" ]; then echo "$2"; else echo "$1"; fi
}

step() {  # SECONDS NAME COMMAND...: run a command for so many seconds at most. What it prints is in $out/NAME.txt, its end is shown
  local seconds=$1 said=$out/$2.txt title=$2 status began=$SECONDS
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
  timeout -s INT -k 20 "$seconds" "$@" > "$said" 2>&1
  status=$?
  tail -n "${LINES_SHOWN:-25}" "$said" | cut -c 1-220
  echo "--- $title: status $status after $((SECONDS - began)) s"
}

sweep() {  # SECONDS NAME OPTION...: a sweep into $out/NAME, or into the study that an option names, with its report and MLflow run
  local seconds=$1 title=$2
  shift 2
  case " $* " in *" study="*) ;; *) set -- "$@" "study=$title" ;; esac
  step "$seconds" "$title" "${from[@]}" "$PYTHON" launch.py -m "$@" "${one[@]}" "output_dir=$out"
}

with_old() {  # COMMAND...: the same with the checkout of an older commit, which OLD names
  from=(env -C "$OLD" "PYTHONPATH=$OLD$around")
  "$@"
  from=()
}

cells() {  # SECONDS STUDY OPTION...: the same without report and MLflow, for figures of cells
  sweep "$@" tracking=none report=false
}

analysis() {  # NAME COMMAND...: what a reader says of the results
  local title=$1
  shift
  step 60 "$title" "$PYTHON" -m analysis "$@"
}

finish() {  # STUDY...: check the samples of studies, and pack all that was measured into $out/NAME.tar.gz
  local study
  if [ "${SHOW:-}" ]; then return; fi
  BUDGET=$((BUDGET + 25))
  for study in "$@"; do
    if [ -d "$out/$study" ]; then analysis "verify_$study" verify "$out/$study" --pack; fi
  done
  # Made beside the folder, which tar would otherwise see change. Traces are large: they have an archive of their own.
  local without=(--exclude=.compiled --exclude='mlflow.db*' --exclude=mlartifacts --exclude='*.tar.gz')
  tar -czf "$out.$name.tar.gz" -C "$out" "${without[@]}" --exclude=profile .
  mv "$out.$name.tar.gz" "$out/$name.tar.gz"
  if (cd "$out" && find . -name mlartifacts -prune -o -type d -name profile -print0 > "$out/profiles" && [ -s profiles ]); then
    tar -czf "$out/$name.traces.tar.gz" -C "$out" --null -T "$out/profiles"
  fi
  rm "$out/profiles"
  echo "=== $(date -u '+%F %T') $name: $SECONDS s in all, $(du -h "$out/$name.tar.gz" | cut -f 1) in $out/$name.tar.gz"
}

if [ -z "${SHOW:-}" ]; then
  mkdir -p "$out"
  echo "=== $(date -u '+%F %T') $name, commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown), load $(cut -d ' ' -f 1-3 /proc/loadavg)"
  nvidia-smi --query-gpu=index,name,driver_version,memory.used,utilization.gpu,clocks.sm --format=csv,noheader 2> /dev/null ||
    echo "no NVIDIA driver answers"
fi
