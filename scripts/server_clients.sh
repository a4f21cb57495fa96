#!/bin/sh
# Tests foretoken-server with real clients: the OpenAI and Anthropic Python clients, litellm, pydantic-ai, curl, and schemathesis over
# /openapi.json (no 5xx). Installs them from PyPI into target/clients. Build the server first:
#
#   cargo build --release -p foretoken-server && scripts/server_clients.sh [target/release/foretoken-server]
set -eu
cd "$(dirname "$0")/.."
server=${1:-target/release/foretoken-server}
out=target/clients
[ -x $out/bin/schemathesis ] || {
    python3 -m venv $out
    $out/bin/pip install -q --disable-pip-version-check openai anthropic litellm "pydantic-ai-slim[openai]" schemathesis
}
python3 scripts/tiny_caller.py $out/caller
trap 'kill $pids 2>/dev/null || true' EXIT
pids=
# Starts a server, waits for its address and sets $url.
start() {
    log=$out/$1.log
    shift
    "$server" --port 0 "$@" 2>"$log" &
    pids="$pids $!"
    url=
    for _ in $(seq 600); do
        url=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | sed -n 's/.*url="\{0,1\}\(http:[^" ]*\).*/\1/p' | head -1)
        [ -z "$url" ] || return 0
        sleep 0.1
    done
    echo "the server did not start: $log" >&2
    exit 1
}
start demo
demo=$url
start caller --model $out/caller --alias caller
LITELLM_LOCAL_MODEL_COST_MAP=True $out/bin/python scripts/server_clients.py "$demo" "$url"
curl -sS --fail-with-body "$demo/v1/chat/completions" -H 'content-type: application/json' -N \
    -d '{"messages": [{"role": "user", "content": "fn main() {"}], "max_tokens": 8, "stream": true}' | tail -2 | grep -q DONE
echo "passed: curl"
# Short texts and contexts: the content does not matter here.
start fuzzed --max-tokens 8 --ctx-size 512 --parallel 8
# schemathesis writes its findings to the working directory.
(cd $out && bin/schemathesis run "$url/openapi.json" --checks not_a_server_error --max-examples "${EXAMPLES:-50}" --workers 2 \
    --request-timeout 60 --generation-deterministic --suppress-health-check all)
curl -sS --fail-with-body "$url/health"
echo
