#!/usr/bin/env bash
# Builds the wheel into dist/, installs it with plain pip into an empty environment, and runs
# `kvroute` there. Versions are those of the lock; with --newest, pip's own choice.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

main() {
    rm -rf dist
    "$python" -m pip wheel --quiet --quiet --no-deps --build-constraint requirements/build.lock \
        --wheel-dir dist .
    local wheel
    wheel=$(echo "$PWD"/dist/kvroute-*.whl)
    echo "wheel: ${wheel##*/}, $(du -k "$wheel" | cut -f 1) KiB"
    "$python" -m zipfile --list "$wheel" >"$work/files"
    grep -q '/py\.typed' "$work/files" || fail "it has no py.typed"

    "$python" -m venv "$work/venv"
    # Without the hashes: pip would require one for this wheel too.
    [ "${1:-}" = --newest ] || grep -oE '^[a-z0-9-]+==[^ ]+' requirements/cpu.lock >"$work/pins"
    touch "$work/pins"
    "$work/venv/bin/python" -m pip install --quiet --quiet --no-compile \
        --constraint "$work/pins" "$wheel"
    "$work/venv/bin/python" -m pip check
    echo "wheel: $("$work/venv/bin/python" -m pip list --format freeze | wc -l) packages installed"

    cd "$work" # where Python finds none of the checkout's modules
    unset PYTHONPATH
    write_trace >trace.jsonl
    kvroute --version
    kvroute --help >help
    kvroute replay --help >help
    kvroute replay trace.jsonl --replicas 2 --policy all
    explains_what_is_missing
    "$work/venv/bin/python" -m pip install --quiet --quiet --no-compile \
        --constraint "$work/pins" "$wheel[cluster]"
    refuses 'kvroute\[demo\]' --engine simulated
    echo "wheel: works"
}

kvroute() { "$work/venv/bin/kvroute" "$@"; }

# Twenty requests, one a second: five documents, asked about four times each.
write_trace() {
    local i
    for i in {0..19}; do
        echo "{\"timestamp\": $((i * 1000)), \"input_length\": 1100, \"output_length\": 20," \
            "\"hash_ids\": [$((i % 5 * 100)), $((i % 5 * 100 + 1)), $((1000 + i))]}"
    done
}

# Neither vLLM nor Ray is installed: serve reports it before any start.
explains_what_is_missing() {
    export XDG_CACHE_HOME=$work/cache # where the built-in model is not
    refuses 'kvroute\[gpu\]'
    refuses 'kvroute\[cluster\]' --engine simulated
}

refuses() {
    local remedy=$1
    shift
    if kvroute serve "$@" >said 2>&1; then fail "kvroute serve $* started"; fi
    grep -q "$remedy" said || fail "kvroute serve $* does not name $remedy: $(cat said)"
}

fail() {
    echo "wheel: $*" >&2
    exit 1
}

main "$@"
