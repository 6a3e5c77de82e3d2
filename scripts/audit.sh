#!/usr/bin/env bash
# Look pinned packages up in the OSV database of known vulnerabilities: scripts/audit.sh CONSTRAINTS...
# Needs the network. Exit code 1 when a package is vulnerable or could not be looked up.
set -euo pipefail
cd "$(dirname "$0")/.."

state=0
for pins in "$@"; do
    echo "== $pins"
    # Local versions of builds (torch 2.13.0+cpu) are unknown to the database; their public version is looked up.
    wanted=$(mktemp)
    grep -E '^[A-Za-z0-9]' "$pins" | sed -E 's/(==[^+ ;]+)\+[^ ;]+/\1/' >"$wanted"
    .venv/bin/uv tool run pip-audit --strict --no-deps --disable-pip --vulnerability-service osv --requirement "$wanted" || state=1
    rm -f "$wanted"
done
exit $state
