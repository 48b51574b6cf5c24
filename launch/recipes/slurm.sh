#!/usr/bin/env bash
# One study on one node:  sbatch launch/recipes/slurm.sh -m gpus=scale study=first
# Called from the clone; what stands behind the script's name goes to launch.py.
#SBATCH --job-name=ringside
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=ringside-%j.log

# One task has all GPUs and all cores: launch.py starts the processes on the GPUs itself, so there is no srun here.
# Two minutes before the end Slurm sends SIGTERM: launch.py closes the running cell, and the same sbatch goes on from there.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
exec "${RINGSIDE_PYTHON:-.venv/bin/python}" launch.py "$@"
