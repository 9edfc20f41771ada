#!/usr/bin/env bash
# Installs requirements/$1.lock and this project into .venv; $1 is cpu or gpu.
# `setup.sh $1 dev` adds the packages for tests and development: requirements/dev.lock.
# The file .venv/ready-$1 exists only after a complete run; an interrupted run starts again.
# .venv/ready-dev has the same meaning for dev.lock.
set -eEuo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

profile=$1
locks=("requirements/$profile.lock" ${2:+"requirements/$2.lock"})
ready=.venv/ready-$profile
log=.venv/setup.log
stages=4 # of `stage`, below
progress_step=25 # without a terminal, a line is printed for so many packages

main() {
    [ "$(uname -s)" = Linux ] || fail "this is $(uname -s); kvroute runs on Linux only"
    local python
    python=$(find_python)
    [ -e "$ready" ] || rm -rf .venv
    "$python" scripts/check_machine.py "$profile" || exit 1
    announce "${1:-}"
    rm -f .venv/ready-*
    if [ ! -d .venv ]; then
        stage 1 "creating .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    : >"$log"
    trap 'show_errors; fail "not finished; the whole output is in $log"' ERR
    install_everything
    stage 4 "compiling what a start imports"
    warm_up
    touch "$ready" ${1:+".venv/ready-$1"}
    echo "setup: ready"
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
        "install one (Debian 12, Ubuntu 24.04: sudo apt-get install python3 python3-venv)," \
        "or say which to use: make setup PYTHON=/path/to/python3.11"
}

announce() {
    if [ -e "$ready" ]; then
        echo "setup: updates .venv${1:+, with the packages for tests and development}"
    else
        echo "setup: installs about $(installed_gb) GB into .venv; takes about 5 minutes, once"
    fi
}

installed_gb() { sed -n 's/^installed-gb //p' "requirements/machine-$profile.txt"; }

stage() { echo "setup: $1/$stages $2"; }

install_everything() {
    stage 2 "installing pip$([ "$profile" = gpu ] || echo " and torch for CPUs")"
    install "pip==26.3"
    if [ "$profile" = cpu ]; then install_torch_cpu; fi
    stage 3 "installing $(count_packages) packages"
    install --require-hashes "${locks[@]/#/--requirement=}"
    install --build-constraint requirements/build.lock --editable .
    .venv/bin/python scripts/name_vllm.py
}

count_packages() { cat "${locks[@]}" | grep -c '^[a-z]'; }

install_torch_cpu() {
    local torch=requirements/torch-cpu.txt
    # The first one finds it on an index, or in a folder, of yours.
    install -r $torch || install --index-url "$torch_cpu_index" -r $torch
}

# pip's output goes to the log; the terminal shows the progress.
install() {
    .venv/bin/python -m pip install --progress-bar off --no-compile --no-deps "$@" 2>>"$log" |
        tee -a "$log" | show_progress
}

show_progress() {
    local verb name rest count=0 unpacking=
    while read -r verb name rest; do
        case $verb in
        # pip calls a package from a folder of this machine "Processing PATH".
        Collecting | Processing) count=$((count + 1)) && show_package $count "${name##*/}" ;;
        Installing)
            [ $count -lt $progress_step ] || { show_unpacking $count & unpacking=$!; }
            ;;
        esac
    done
    [ -z "$unpacking" ] || { kill "$unpacking" && wait "$unpacking"; } 2>/dev/null || true
    if [ -t 1 ]; then printf '\r\033[K'; fi
}

# On a terminal one line is overwritten; elsewhere some packages get a line.
show_package() {
    if [ -t 1 ]; then
        printf '\r\033[K       %s: %s' "$1" "$2"
    elif [ $(($1 % progress_step)) = 0 ]; then
        echo "setup:     package $1, $2"
    fi
}

# pip prints nothing while it unpacks, for minutes; each unpacked package has a folder *.dist-info.
show_unpacking() {
    local before pause_s=15 text
    before=$(count_unpacked)
    if [ -t 1 ]; then pause_s=1; fi
    while true; do
        text="unpacking: $(($(count_unpacked) - before)) of $1 packages"
        if [ -t 1 ]; then printf '\r\033[K       %s' "$text"; else echo "setup:     $text"; fi
        sleep $pause_s
    done
}

count_unpacked() {
    find .venv/lib -maxdepth 3 -name '*.dist-info' | wc -l
}

show_errors() {
    grep -vE '^( |Collecting|Requirement|WARNING|ERROR: Ignored|$)' "$log" | cut -c 1-200 | tail -n 8
}

# Compiles only the modules that a start imports, and checks that they can be imported.
warm_up() {
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -W ignore -c \
        'import ray.serve, kvroute.cli, vllm.v1.engine.async_llm' >>"$log" 2>&1
}

fail() {
    echo "setup: $*" >&2
    exit 1
}

main "${2:-}"
