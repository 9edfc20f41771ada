#!/usr/bin/env bash
# Makes .venv hold what requirements-$1.lock says, and this project; $1 is cpu or gpu.
# The file .venv/ready-$1 exists only while that is so: after an interruption we begin afresh.
set -eEuo pipefail
cd "$(dirname "$0")/.."

profile=$1
lock=requirements-$profile.lock
ready=.venv/ready-$profile
log=.venv/setup.log
torch_cpu_index=https://download.pytorch.org/whl/cpu

main() {
    [ "$(uname -s)" = Linux ] || fail "this is $(uname -s); kvroute runs on Linux only"
    [ -e "$ready" ] || rm -rf .venv
    rm -f .venv/ready-*
    [ -d .venv ] || make_venv
    : >"$log"
    trap 'show_errors; fail "not finished; all that was said is in $log"' ERR
    install_everything
    warm_up
    touch "$ready"
    echo "setup: ready"
}

make_venv() {
    local python
    python=$(find_python)
    echo "setup: .venv with $("$python" --version); this takes some minutes, once"
    "$python" -m venv .venv || fail "on Debian and Ubuntu, venv comes with: apt install python3-venv"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "there is no Python 3.11 or newer under the name ${PYTHON:-python3.11 or python3};" \
        "install one, or say which: make setup PYTHON=/path/to/python3.11"
}

install_everything() {
    echo "setup: pip"
    install "pip==26.3"
    if [ "$profile" = cpu ]; then
        echo "setup: torch for CPUs"
        install_torch_cpu "$(grep '^torch==' "$lock")"
    fi
    echo "setup: $(grep -c '^[a-z]' "$lock") packages"
    install -r <([ "$profile" = cpu ] && grep -v '^torch==' "$lock" || cat "$lock")
    install --no-build-isolation --editable .
}

# PyPI has torch for CUDA only. The CPU build may be on an index, or in a folder, of yours.
install_torch_cpu() {
    install "$1" || install --index-url "$torch_cpu_index" "$1"
}

# pip's words go to the log; a person sees how far it is.
install() {
    .venv/bin/python -m pip install --progress-bar off --no-compile --no-deps "$@" 2>>"$log" |
        tee -a "$log" | show_progress
}

show_progress() {
    local verb name count=0
    while read -r verb name _; do
        case $verb in
        Collecting) count=$((count + 1)) && show "$count: $name" ;;
        Installing) show "unpacking" ;;
        esac
    done
    show ""
}

# One line that is written over and over; nothing where nobody watches.
show() {
    if [ -t 1 ]; then printf '\r\033[K%s' "${1:+       $1}"; fi
}

show_errors() {
    grep -vE '^( |Collecting|Requirement|WARNING|ERROR: Ignored|$)' "$log" | cut -c 1-200 | tail -n 8
}

# Compiles what a start imports and nothing else, and shows that it can be imported.
warm_up() {
    echo "setup: first import"
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -c \
        'import ray.serve, router.cli, vllm.v1.engine.async_llm' >>"$log" 2>&1
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

main
