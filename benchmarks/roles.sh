#!/bin/sh
# Compares two workers of both roles with a prefill and a decode worker, and with two whole workers, on two GPUs:
#   benchmarks/roles.sh RESULTS [flags of benchmarks.serving]
# Closed streams of 1,024 tokens in and 128 out. Each layout's results are in a folder of its name below RESULTS.
set -eu
results=$1
shift
measure() {
    layout=$1
    shift
    echo "== $layout: kvrail up $*"
    python -m benchmarks.serving --shape qwen3-8b --device cuda --sampling sampled --goodput ttft:300 tpot:15 \
        --out "$results/$layout" $flags --up "$@"
}
flags=${*:---streams 8,32,64,128 --rounds 20}  # the first seconds of a row still follow the row before
measure both --prefill-workers 0 --decode-workers 0 --workers 2
measure pair --prefill-workers 1 --decode-workers 1
measure whole --prefill-workers 0 --decode-workers 2
