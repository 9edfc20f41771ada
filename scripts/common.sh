# Functions and values that several scripts share. They are sourced in the root of the checkout.
# shellcheck shell=bash

# The index of torch for CPUs: PyPI has torch for CUDA only.
# shellcheck disable=SC2034 # the other scripts use it
torch_cpu_index=https://download.pytorch.org/whl/cpu

# The version of this checkout.
version() { sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml; }

# The lines name==version of locks, without hashes: pip would then need one for each package.
pins() { grep -hoE '^[a-z0-9-]+==[^ ]+' "$@"; }

# Creates an environment in the folder $1, and installs the other arguments with plain pip.
new_environment() {
    local folder=$1
    shift
    .venv/bin/python -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --quiet --no-compile "$@"
}
