#!/usr/bin/env bash
# Installs requirements/$1.lock and this project into .venv; $1 is cpu or gpu.
# `setup.sh $1 dev` adds the packages for tests and development: requirements/dev.lock.
# The file .venv/ready-$1 exists only after a complete run: an interrupted one starts again.
# .venv/ready-dev has the same meaning for dev.lock.
set -eEuo pipefail
cd "$(dirname "$0")/.."

profile=$1
locks=("requirements/$profile.lock" ${2:+"requirements/$2.lock"})
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
    touch "$ready" ${1:+".venv/ready-$1"}
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
        install_torch_cpu
    fi
    echo "setup: $(cat "${locks[@]}" | grep -c '^[a-z]') packages"
    install --require-hashes "${locks[@]/#/--requirement=}"
    install --build-constraint requirements/build.lock --editable .
}

# PyPI has torch for CUDA only. The CPU build may be on an index, or in a folder, of yours.
install_torch_cpu() {
    local torch=requirements/torch-cpu.txt
    install -r $torch || install --index-url "$torch_cpu_index" -r $torch
}

# pip's output goes to the log; the terminal shows the progress.
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

# One line that is overwritten; no output without a terminal.
show() {
    if [ -t 1 ]; then printf '\r\033[K%s' "${1:+       $1}"; fi
}

show_errors() {
    grep -vE '^( |Collecting|Requirement|WARNING|ERROR: Ignored|$)' "$log" | cut -c 1-200 | tail -n 8
}

# Compiles only the modules that a start imports, and checks that they can be imported.
warm_up() {
    echo "setup: first import"
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -c \
        'import ray.serve, kvroute.cli, vllm.v1.engine.async_llm' >>"$log" 2>&1
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

main "${2:-}"
