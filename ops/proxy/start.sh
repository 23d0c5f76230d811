#!/bin/sh
# nginx does not read /etc/resolv.conf: tell it whom to ask where the gateways are, then become it.
set -eu
nameserver=$(awk '$1 == "nameserver" { print ($2 ~ /:/) ? "[" $2 "]" : $2; exit }' /etc/resolv.conf)
echo "resolver $nameserver valid=2s ipv6=off;" > /tmp/resolver.conf
exec nginx -e stderr -c /etc/splitflap/nginx.conf -g 'daemon off;'
