#!/bin/sh
# Compares KV over UCX without TLS, in the clear beside mutual TLS, and sealed over sockets, on two GPUs:
#   benchmarks/sealed.sh RESULTS [flags of benchmarks.serving]
# A prefill and a decode worker. Each choice's results are in a folder of its name below RESULTS.
set -eu
results=$1
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python -m kvrail certs "$scratch"
for role in router prefill decode; do
    printf '[%s]\ntls_ca = "%s"\ntls_cert = "%s"\ntls_key = "%s"\n' \
        $role "$scratch/ca.pem" "$scratch/$role.pem" "$scratch/$role.key"
done > "$scratch/tls.toml"
measure() {
    choice=$1
    shift
    echo "== $choice: kvrail up $*"
    python -m benchmarks.serving --shape qwen3-8b --device "${DEVICE:-cuda}" --sampling sampled --out "$results/$choice" \
        $flags --up "$@"
}
flags=${*:---streams 1,8,32,8x8000 --rounds 8}
measure plain
measure clear --config "$scratch/tls.toml" --ucx-in-clear
measure sealed --config "$scratch/tls.toml"
