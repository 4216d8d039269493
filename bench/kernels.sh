#!/usr/bin/env bash
# Runs test programs on Debian's own kernels, in qemu without acceleration: what a ring does on an older kernel is seen
# there, not only what it would do with fewer features (RingOptions::kernel_max).
#
#   bench/kernels.sh PACKAGE 'COMMANDS' PROGRAM...
#
#   cargo test -p gale-runtime --no-run --test ring --test ring_refused
#   bench/kernels.sh linux-image-6.1.0-50-cloud-amd64 'GALE_TEST_KERNEL_MAX=6.1 ring && ring_refused' \
#       target/debug/deps/{ring,ring_refused}-????????????????
#
# PACKAGE is a package of apt's, fetched once to target/kernels and not installed (`apt-cache search linux-image`; newer
# kernels are in backports, from 7.0 on as linux-binary). The commands find each program by its name without cargo's
# hash. Each is at its own place, too, so that tests of the server find target/debug/gale if that is among the programs:
#
#   bench/kernels.sh PACKAGE 'churn --test-threads=1' target/debug/deps/churn-???????????????? target/debug/gale
#
# GALE_TEST_KERNEL_MAX spares `ring` its ten runs as older kernels, and `ring_stress` needs GALE_STRESS_SECONDS=3 to get
# an answer for each ring. A program takes some twenty times its time, so no time that is measured there means anything.
# Needs qemu-system-x86, busybox-static (as a package that can be fetched) and cpio. Ends with the commands' status.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 2; }
package=$1 commands=$2
shift 2

cd "$(dirname "$0")/.."
kept=target/kernels
mkdir -p "$kept"
for wanted in "$package" busybox-static; do
  [ -d "$kept/$wanted" ] && continue
  (cd "$kept" && apt-get download "$wanted" && dpkg-deb -x "${wanted}"_*.deb "$wanted")
done

root=$(mktemp -d)
# The worker process is nobody there.
chmod 755 "$root"
trap 'rm -rf "$root" "$root.cpio" "$root.log"' EXIT
mkdir -p "$root"/{bin,proc,sys,dev,tmp,etc}
echo 'root:x:0:0::/:/bin/sh
nobody:x:65534:65534::/:/bin/sh' > "$root/etc/passwd"
echo 'root:x:0:
nogroup:x:65534:' > "$root/etc/group"
cp "$kept/busybox-static/bin/busybox" "$root/bin/"
for name in sh mount ip poweroff cat grep tail uname; do ln -s busybox "$root/bin/$name"; done
for program in "$@"; do
  name=$(basename "$program" | sed 's/-[0-9a-f]\{16\}$//')
  strip -g -o "$root/bin/$name" "$program"
  mkdir -p "$root$(realpath "$(dirname "$program")")"
  ln -sf "/bin/$name" "$root$(realpath "$program")"
  ldd "$program" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -nL "$library" "$root$library"
  done
done
cat > "$root/init" <<INIT
#!/bin/sh
mount -t proc none /proc; mount -t sysfs none /sys; mount -t devtmpfs none /dev
ip link set lo up
ulimit -n 20000
export PATH=/bin
echo kernels.sh: begins
($commands) 2>&1
echo "kernels.sh: status \$?"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) > "$root.cpio"
# Without acceleration some kernels die while they boot, now and then.
for _ in 1 2 3 4 5; do
  qemu-system-x86_64 -m 2G -smp 2 -cpu Nehalem -nographic -no-reboot -initrd "$root.cpio" \
    -kernel "$(find "$kept/$package" -name 'vmlinuz*')" -append "console=ttyS0 quiet panic=-1" < /dev/null | tee "$root.log"
  grep -q 'kernels.sh: begins' "$root.log" && break
done
grep -q 'kernels.sh: status 0' "$root.log"
