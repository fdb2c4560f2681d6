#!/bin/sh
# Start the server's side: a SuperLink that speaks TLS and lets in only SuperNodes whose keys are registered.
#   ./superlink.sh [address] [port]
# For a test on one machine, without encryption and open to everybody who can reach the port:
#   INSECURE_ANYONE_CAN_JOIN_AND_READ=yes ./superlink.sh
set -eu
cd "$(dirname "$0")"
host="${1:-127.0.0.1}"
port="${2:-8000}"
export FLWR_HOME="$PWD/.flwr" FLWR_TELEMETRY_ENABLED="${FLWR_TELEMETRY_ENABLED:-0}"
if [ "${INSECURE_ANYONE_CAN_JOIN_AND_READ:-no}" = yes ]; then
    echo "WARNING: no encryption and no authentication: anyone who reaches $host:$port can join and read the models." >&2
    exec flower-superlink --insecure --host "$host" --port "$port" --disable-runtime-dependency-installation
fi
[ -f keys/server.crt ] || { echo "keys/server.crt is missing: run 'fedagg flower keys .' first" >&2; exit 2; }
exec flower-superlink --host "$host" --port "$port" --enable-supernode-auth \
    --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.crt --ssl-keyfile keys/server.key \
    --disable-runtime-dependency-installation
