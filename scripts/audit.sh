#!/usr/bin/env bash
# Known vulnerabilities of the packages that a Python has: audit.sh PIP_AUDIT PYTHON
# Exit status: 0 none known, 1 some, 75 the service could not be asked, so that nothing is known.
set -uo pipefail
packages=$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || exit 1
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$1" --progress-spinner off --skip-editable --path "$packages" > "$report" 2>&1
status=$?
if [ "$status" -ne 0 ] && grep -qiE 'ConnectionError|Max retries|ServiceError|timed out' "$report"; then
    tail -n 3 "$report" >&2
    echo "audit: the vulnerability service could not be reached, so NOTHING was checked" >&2
    exit 75
fi
cat "$report"
exit "$status"
