#!/bin/busybox sh
# The first program of the guest, in its initial file system: makes the host's root its own, with a layer above it that
# takes what is written and is gone with the guest.
/bin/busybox mkdir -p /proc /sys /dev /lower /upper /root
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs devtmpfs /dev
exec </dev/console >/dev/console 2>&1
while read -r module; do
	/bin/busybox insmod "/modules/$module" || echo "module $module cannot be loaded"
done </modules/order
for word in $(/bin/busybox cat /proc/cmdline); do
	case $word in turnout.job=*) job=${word#turnout.job=} ;; esac
done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro root /lower || exit 1 # the end of the first program is that of the guest
/bin/busybox mount -t tmpfs -o size=80% tmpfs /upper
/bin/busybox mkdir -p /upper/data /upper/work
/bin/busybox mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /root
/bin/busybox umount /proc
exec /bin/busybox switch_root /root /bin/sh "$job/guest.sh" "$job"
