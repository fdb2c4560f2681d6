#!/bin/sh
# Start the server's side: a SuperLink that speaks TLS and knows its nodes by their keys. It listens on this machine only, because anyone who
# reaches it can register keys and start runs; ./proxy.sh lets nodes in. What it knows is in state/superlink.db, and
# survives a restart.
#   ./superlink.sh [port]
# For a test on one machine, without encryption and open to anyone who can reach the port:
#   INSECURE_ANYONE_CAN_JOIN_AND_READ=yes ./superlink.sh
set -eu
cd "$(dirname "$0")"
port="${1:-8000}"
export FLWR_HOME="$PWD/.flwr" FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
if [ "${INSECURE_ANYONE_CAN_JOIN_AND_READ:-no}" = yes ]; then
    echo "WARNING: no encryption and no authentication: anyone who reaches port $port can join and read the models." >&2
    exec flower-superlink --insecure --host 127.0.0.1 --port "$port" --disable-runtime-dependency-installation
fi
[ -f keys/server.crt ] || { echo "keys/server.crt is missing: run 'fedagg flower keys .' first" >&2; exit 2; }
mkdir -p state
chmod 700 state
exec flower-superlink --host 127.0.0.1 --port "$port" --database state/superlink.db --enable-supernode-auth \
    --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \
    --disable-runtime-dependency-installation
