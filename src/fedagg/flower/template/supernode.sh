#!/bin/sh
# Start a node: it needs keys/ca.crt and its own keys/node-N, and nothing else of keys/.
#   ./supernode.sh N NODES [address of the server's proxy] [local port] [more settings of the node, such as 'device="cuda:1"']
# Against a SuperLink that was started without encryption:
#   INSECURE_ANYONE_CAN_JOIN_AND_READ=yes ./supernode.sh N NODES 127.0.0.1:8000
set -eu
cd "$(dirname "$0")"
node="$1"
nodes="$2"
superlink="${3:-127.0.0.1:8443}"
port="${4:-$((9100 + node))}"
export FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
config="partition-id=$node num-partitions=$nodes state-dir=\"$PWD/state\" ${5:-}"
if [ "${INSECURE_ANYONE_CAN_JOIN_AND_READ:-no}" = yes ]; then
    echo "WARNING: no encryption and no authentication: anyone on the way can read the models." >&2
    exec flower-supernode --insecure --superlink "$superlink" --port "$port" --node-config "$config"
fi
[ -f "keys/node-$node" ] || { echo "keys/node-$node is missing: run 'fedagg flower keys .' on the server, and copy it here" >&2; exit 2; }
exec flower-supernode --superlink "$superlink" --root-certificates keys/ca.crt \
    --auth-supernode-private-key "keys/node-$node" --port "$port" --node-config "$config"
