#!/bin/sh
# Regenerates the stubs in kvrail/wire/v1 from proto/; an argument names another output folder.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root}
exec "${PYTHON:-python3}" -m grpc_tools.protoc -I "$root/proto" \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" "$root"/proto/kvrail/wire/v1/*.proto
