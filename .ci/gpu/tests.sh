#!/usr/bin/env bash
# What needs two GPUs in the tests, and was changed without having been seen there. 2 GPUs, about 6 minutes.
# Fills nothing: a failure is a fault of the code or of the test, to be mended before any figure is taken.
. "$(dirname "$0")/common.sh"
tests() {  # SECONDS NAME MARKS FILE
  local only=()
  if [ "${SMALL:-}" ]; then only=(--collect-only -q); fi
  step "$1" "$2" "$PYTHON" -m pytest -n 0 --tb=short "${only[@]}" -m "$3" "tests/$4"
}
LINES_SHOWN=45
tests 200 graphs multi_gpu test_graphs.py
tests 240 calibration multi_gpu test_calibration.py
tests 150 fastest gpu test_fastest.py
tests 300 far_gpus multi_gpu test_far_gpus.py
tests 150 graphs_on_one gpu test_graphs.py
finish
