#!/usr/bin/env bash
# Installs the tests' requirements that are not Python packages: Prometheus with promtool, and Chromium. For Debian
# and Ubuntu, as root. Fails where anything is still missing; a test run lists what it left out.
set -euo pipefail

policy=/usr/sbin/policy-rc.d

main() {
    local wanted=()
    has prometheus && has promtool || wanted+=(prometheus)
    has chromium || has chromium-browser || wanted+=(chromium)
    [ ${#wanted[@]} -gt 0 ] || exit 0
    [ "$(id -u)" = 0 ] || fail "not root; run: sudo apt-get install ${wanted[*]}"
    has apt-get || fail "there is no apt-get; install with your own tools: ${wanted[*]}"
    start_no_services
    apt update || fail "no list of packages"
    local package missing=()
    for package in "${wanted[@]}"; do # Ubuntu has Chromium as a snap only, and Prometheus all the same
        apt install --yes --no-install-recommends "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] || fail "not installed: ${missing[*]}"
    echo "system: installed ${wanted[*]}"
}

has() { command -v "$1" >/dev/null; }

apt() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get --quiet=2 -o DPkg::Lock::Timeout=60 \
        -o Acquire::Retries=2 -o Acquire::http::Timeout=20 "$@" </dev/null >/dev/null
}

# Tests start their own Prometheus: Debian's must not run too.
start_no_services() {
    [ ! -e $policy ] || return 0
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
}

fail() {
    echo "system: $*" >&2
    exit 1
}

main
