#!/usr/bin/env bash
# Sees to it that the Prometheus image of compose.yaml is there. Where it cannot be pulled, one of that name is made of
# Debian's package: prometheus_image.sh IMAGE BASE_IMAGE
set -euo pipefail
image=$1 base=$2
docker image inspect "$image" >/dev/null 2>&1 && exit 0
timeout 120 docker pull --quiet "$image" && exit 0
echo "$image cannot be pulled; making one of Debian's package prometheus"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$(dirname "$0")/debian_package.sh" prometheus "$work"
docker build --quiet --tag "$image" --file - "$work" <<DOCKERFILE
FROM $base
COPY usr/bin/prometheus usr/bin/promtool /bin/
RUN mkdir -p /prometheus && chown nobody /prometheus
USER nobody
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
DOCKERFILE
