#!/usr/bin/env bash
# Installs a package of kvroute with plain pip into an empty environment, and runs `kvroute` there:
# `scripts/check_wheel.sh [--newest] [FILE]`. Without a file, it builds the wheel first. Versions are
# those of the lock; with --newest, pip's own choice.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

main() {
    touch "$work/pins"
    if [ "${1:-}" = --newest ]; then shift; else pins requirements/cpu.lock >"$work/pins"; fi
    if [ -z "${1:-}" ]; then
        .venv/bin/python -m pip wheel --quiet --quiet --no-deps \
            --build-constraint requirements/build.lock --wheel-dir "$work" .
        set -- "$work"/kvroute-*.whl
    fi
    local file
    file=$(realpath "$1")
    echo "wheel: ${file##*/}, $(du -k "$file" | cut -f 1) KiB"
    new_environment "$work/venv" --constraint "$work/pins" "$file"
    "$work/venv/bin/python" -m pip check
    echo "wheel: $("$work/venv/bin/python" -m pip list --format freeze | wc -l) packages installed"

    cd "$work" # where Python finds none of the checkout's modules
    unset PYTHONPATH
    [ -e venv/lib/python3*/site-packages/kvroute/py.typed ] || fail "it has no py.typed"
    [ ! -e venv/lib/python3*/site-packages/ray ] || fail "it has installed Ray"
    write_trace >trace.jsonl
    kvroute --version
    kvroute --help >help
    kvroute replay --help >help
    kvroute replay trace.jsonl --replicas 2 --policy all
    explains_what_is_missing
    "$work/venv/bin/python" -m pip install --quiet --quiet --no-compile \
        --constraint "$work/pins" "$file[cluster]"
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
