#!/usr/bin/env bash
# Installs what tests need besides Python packages: Prometheus with promtool, Chromium, debootstrap,
# which makes the bare machine of `make test-all`, podman, which builds and runs images, and rsync and
# SSH, with which the simulated hosts of `make test-cluster` are reached. For Debian and Ubuntu, as
# root. Fails if something is still missing; a test run ends with a list of the tests that it left out.
set -euo pipefail

policy=/usr/sbin/policy-rc.d

main() {
    local wanted=()
    has prometheus && has promtool || wanted+=(prometheus)
    has chromium || has chromium-browser || wanted+=(chromium)
    has debootstrap || wanted+=(debootstrap)
    has podman || wanted+=(podman)
    has runc || wanted+=(runc)           # also works where cgroups of both versions are mounted
    has catatonit || wanted+=(catatonit) # podman's `--init`
    has ip || wanted+=(iproute2)
    has rsync || wanted+=(rsync)
    has ssh || wanted+=(openssh-client)
    has sshd || [ -x /usr/sbin/sshd ] || wanted+=(openssh-server)
    has curl || wanted+=(curl)
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
