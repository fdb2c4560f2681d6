#!/bin/sh
# Let nodes in: nginx in front of the SuperLink, which passes on only what nodes need.
#   ./proxy.sh [address] [port] [the SuperLink's port]
set -eu
cd "$(dirname "$0")"
host="${1:-0.0.0.0}"
port="${2:-8443}"
superlink="${3:-8000}"
command -v nginx >/dev/null || { echo "nginx is missing: install it, on Debian with: apt-get install nginx-light" >&2; exit 2; }
[ -f keys/server.crt ] || { echo "keys/server.crt is missing: run 'fedagg flower keys .' first" >&2; exit 2; }
mkdir -p .proxy
sed "s/LISTEN ssl/$host:$port ssl/; s/server SUPERLINK/server 127.0.0.1:$superlink/" nginx.conf > .proxy/nginx.conf
exec nginx -p "$PWD" -c "$PWD/.proxy/nginx.conf" -e stderr
