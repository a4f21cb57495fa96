#!/bin/sh
# Writes the measured figures of README.md and DESIGN.md from benches/record, between the markers
#
#     <!-- figures:begin KIND RECORD --> ... <!-- figures:end -->
#
# where RECORD is a directory in benches/record and KIND a function of readme_figures.py.
#
#     scripts/readme_figures.sh           # writes the figures
#     scripts/readme_figures.sh --check   # fails with file and line if they differ from the record
set -eu
command -v python3 >/dev/null || { echo "skipped: figures of README.md and DESIGN.md: python3 is missing"; exit 0; }
exec python3 "$(dirname "$0")/readme_figures.py" "$@"
