#!/bin/bash
# CPU time of a server per handshake and per request over TLS, Gale beside nginx, in turn (A B A B).
#
#   [seconds=5] [cases="full_13 small"] bench/tls.sh GALE NGINX [ROUNDS]
#
# One worker on core 0, the load on core 1; a certificate with a key of P-256; the groups are X25519 alone for both, so
# that both do the same work. The load comes back to a session wherever it can, so full handshakes have a port without
# tickets and without a cache of sessions. What is counted is the CPU time of all processes of the server (utime and
# stime of /proc/PID/stat) over what the load says it was answered. Needs wrk, openssl, curl.
set -euo pipefail
gale=$1 nginx=$2 rounds=${3:-5}
directory=$(mktemp -d)
cd "$directory"
openssl ecparam -name prime256v1 -genkey -noout -out own.key
openssl req -x509 -new -key own.key -subj /CN=localhost -days 30 -out own.crt 2>openssl.log
mkdir www
head -c 65536 /dev/urandom >www/64k
head -c 4194304 /dev/urandom >www/4m

configuration() { # PORT NAME
    cat <<EOF
user root; worker_processes 1; daemon off; pid $directory/$2.pid; error_log $directory/$2.log notice;
events { worker_connections 20000; }
http {
    access_log off; keepalive_requests 1000000000; keepalive_timeout 600s; client_header_timeout 600s;
    ssl_certificate $directory/own.crt; ssl_certificate_key $directory/own.key; ssl_ecdh_curve X25519;
    open_file_cache max=100;
    server { listen 127.0.0.1:$1 ssl; root $directory/www; location = / { return 200 "hello, world\n"; } }
    server { listen 127.0.0.1:$(($1 + 10)) ssl; ssl_session_tickets off; ssl_session_cache off; return 200 "hello, world\n"; }
}
EOF
}

declare -A port=([gale]=18501 [nginx]=18502) program=([gale]=$gale [nginx]=$nginx)
for name in gale nginx; do
    configuration "${port[$name]}" "$name" >"$name.conf"
    taskset -c 0 "${program[$name]}" -p "$directory" -c "$directory/$name.conf" 2>"$name.stderr" &
    started+=($!)
done
trap 'kill "${started[@]}" 2>/dev/null; wait; rm -rf "$directory"' EXIT
for name in gale nginx; do
    curl -sko /dev/null --retry 50 --retry-connrefused --retry-delay 1 "https://127.0.0.1:${port[$name]}/"
done

# The processes of a server: the master and its children.
processes() { echo "$1 $(pgrep -P "$1" | tr '\n' ' ')"; }
ticks() { # clock ticks of all processes of a server
    local sum=0 pid
    for pid in $(processes "$1"); do sum=$((sum + $(awk '{ print $14 + $15 }' "/proc/$pid/stat"))); done
    echo "$sum"
}
master() { cat "$directory/$1.pid"; }
hertz=$(getconf CLK_TCK)

# One figure: microseconds of the server's CPU per answer. The load's last line is how many there were.
once() { # NAME COMMAND…
    local name=$1 before after answers
    shift
    before=$(ticks "$(master "$name")")
    answers=$("$@" "${port[$name]}")
    after=$(ticks "$(master "$name")")
    awk -v t=$((after - before)) -v h="$hertz" -v n="$answers" 'BEGIN { printf "%.1f\n", t / h * 1e6 / n }'
}
wrk_of() { # CONNECTIONS PATH HEADER PORT
    taskset -c 1 wrk -t1 -c"$1" -d"${seconds:-5}"s -H "$3" "https://127.0.0.1:$4$2" | awk '/requests in/ { print $1 }'
}
full_13() { wrk_of 10 / 'Connection: close' "$(($1 + 10))"; }
resumed_13() { wrk_of 10 / 'Connection: close' "$1"; }
handshakes() { # OPTIONS… PORT
    taskset -c 1 openssl s_time -connect "127.0.0.1:${!#}" -time "${seconds:-5}" "${@:1:$#-1}" 2>/dev/null |
        awk '/connections in .* real seconds/ { print $1 }'
}
full_12() { handshakes -new -tls1_2 "$(($1 + 10))"; }
resumed_12() { handshakes -reuse -tls1_2 "$1"; }
small() { wrk_of 50 / 'X: y' "$1"; }
file_64k() { wrk_of 20 /64k 'X: y' "$1"; }
file_4m() { wrk_of 8 /4m 'X: y' "$1"; }

median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
printf '%-34s %10s %10s %8s\n' "µs of the server's CPU for each" Gale nginx ratio
for case in ${cases:-full_13 resumed_13 full_12 resumed_12 small file_64k file_4m}; do
    : >gale.figures
    : >nginx.figures
    for _ in $(seq "$rounds"); do
        for name in gale nginx; do once "$name" "$case" >>"$name.figures"; done
    done
    own=$(median <gale.figures) other=$(median <nginx.figures)
    printf '%-34s %10s %10s %8s\n' "$case" "$own" "$other" "$(awk -v a="$own" -v b="$other" 'BEGIN { printf "%.2f", a / b }')"
done
