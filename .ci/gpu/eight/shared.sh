# What the scripts for many GPUs share: how many there are, and their subsets. N=4 runs them on four, and every study says how many.
. "$(dirname "$0")/../common.sh"
N=${N:-$(small 8 2)}
all=$(seq -s , 0 $((N - 1)))
halves=$(seq -s , 0 $((N / 2 - 1)))
each=$(seq 0 $((N - 1)) | sed 's/.*/[&]/' | paste -sd ,)
scale='[0,1]'  # 2, 4, … all: one GPU alone is in $each
for ((size = 4; size <= N; size *= 2)); do scale+=",[$(seq -s , 0 $((size - 1)))]"; done
