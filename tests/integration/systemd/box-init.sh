#!/bin/sh
# Runs as PID 1 of new mount, PID, UTS, IPC, network and cgroup namespaces: makes a throw-away root (an overlay on /)
# and becomes systemd. $1: an empty directory of the host.
set -e
here=$(dirname "$(readlink -f "$0")")
box=$1
mount --make-rprivate /
mount -t tmpfs -o mode=755,size=512m box "$box"
mkdir "$box/upper" "$box/work" "$box/root"
mount -t overlay -o lowerdir=/,upperdir="$box/upper",workdir="$box/work" overlay "$box/root"
r=$box/root

mount -t proc -o nosuid,nodev,noexec proc "$r/proc"
mount -t sysfs -o ro,nosuid,nodev,noexec sys "$r/sys"
mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 "$r/sys/fs/cgroup"
mount -t tmpfs -o mode=755,nosuid,size=4m dev "$r/dev"
mkdir "$r/dev/pts" "$r/dev/shm" "$r/dev/mqueue"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 pts "$r/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev shm "$r/dev/shm"
ln -s pts/ptmx "$r/dev/ptmx"
for d in null zero full random urandom tty; do : > "$r/dev/$d"; mount --bind "/dev/$d" "$r/dev/$d"; done
ln -s /proc/self/fd "$r/dev/fd"
ln -s fd/0 "$r/dev/stdin"; ln -s fd/1 "$r/dev/stdout"; ln -s fd/2 "$r/dev/stderr"
mount -t tmpfs -o mode=755,nosuid,nodev run "$r/run"
mount -t tmpfs -o mode=1777,nosuid,nodev tmp "$r/tmp"

# only the units that a service needs around it; /etc/systemd/system starts empty
mkdir -p "$r/run/units"
grep -v '^#' "$here/box-units.txt" | while read -r unit; do
    cp -P "/usr/lib/systemd/system/$unit" "$r/run/units/" 2>/dev/null || :
done
cat > "$r/run/units/kvd-test.target" <<'UNIT'
[Unit]
Description=kvd test box
DefaultDependencies=no
Requires=systemd-journald.service basic.target
After=systemd-journald.service basic.target
AllowIsolate=yes
UNIT
mount --bind "$r/run/units" "$r/usr/lib/systemd/system"
mount -t tmpfs -o mode=755 etc-units "$r/etc/systemd/system"
mkdir -p "$r/etc/systemd/system.conf.d" "$r/etc/systemd/journald.conf.d"
printf '[Manager]\nShowStatus=no\nDefaultTimeoutStopSec=5s\n' > "$r/etc/systemd/system.conf.d/box.conf"
printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' > "$r/etc/systemd/journald.conf.d/box.conf"

for d in $BOX_RO; do
    to=${d#*:}; d=${d%%:*}
    mkdir -p "$r$to"; mount --bind "$d" "$r$to"; mount -o remount,bind,ro "$r$to"
done
mkdir -p "$r$BOX_CONTROL"; mount --bind "$BOX_CONTROL" "$r$BOX_CONTROL"

# the kernel's global settings are not ours
mount --bind "$r/proc/sys" "$r/proc/sys"; mount -o remount,bind,ro "$r/proc/sys"
ip link set lo up
cd "$r"
mkdir -p "$r/run/old"
pivot_root . run/old
umount -l /run/old; rmdir /run/old
mount --make-rshared /                  # credentials need it
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    container=kvd-box LANG=C.UTF-8 NOTIFY_SOCKET="$BOX_CONTROL/notify" \
    setpriv --bounding-set=-sys_module,-sys_time,-sys_rawio,-syslog,-mac_admin,-mac_override \
    /lib/systemd/systemd --system --unit=kvd-test.target --log-target="$BOX_LOG_TARGET" --log-level=info
