#!/bin/sh
# Writes the measured figures of README.md and DESIGN.md from benches/record, between the markers
#
#     <!-- figures:begin KIND RECORD --> ... <!-- figures:end -->
#
# where RECORD is a directory of benches/record and KIND a function of readme_figures.py.
#
#     scripts/readme_figures.sh           # writes
#     scripts/readme_figures.sh --check   # fails, naming file and line, if they say something else
set -eu
command -v python3 >/dev/null || { echo "skipped: figures of README.md and DESIGN.md: there is no python3"; exit 0; }
exec python3 "$(dirname "$0")/readme_figures.py" "$@"
