#!/bin/bash
# Runs a command in a throw-away virtual machine whose kernel has soft RoCE (rdma_rxe), on a host
# whose own kernel has no InfiniBand. The guest's root is this machine's root: shared read-only over
# 9p with a tmpfs laid on it, so it has the same Python, libraries and build at the same paths, and
# nothing that it writes stays, except under $RDMA_VM_OUT.
#
#   run_in_vm.sh COMMAND ARG...  exit status: the command's; 125: the guest gave no status
#   run_in_vm.sh --prepare       installs and fetches what it needs; 3: it cannot, and says why
#
# RDMA_VM_CACHE   kernel and initramfs, reused when there (~/.cache/cloverinfer/rdma-vm; 94 MB)
# RDMA_VM_OUT     a folder that the guest writes through to (a fresh one under the cache)
# RDMA_VM_LIMIT   seconds that the guest may run (600)
# RDMA_VM_CPUS    virtual CPUs (1): two make Python slower, and let two threads spin
#
# The guest has rx0 on v0 (10.98.0.1) and rx1 on v1 (10.98.0.2), the two ends of a veth pair; RoCE
# packets really cross it. No KVM, so that it runs where the host is a guest itself.
set -euo pipefail
CACHE=${RDMA_VM_CACHE:-$HOME/.cache/cloverinfer/rdma-vm}
PACKAGES=(qemu-system-x86 busybox-static cpio kmod iproute2 libibverbs1 libibverbs-dev
  ibverbs-providers perftest)
MODULES=(virtio_pci 9pnet_virtio 9p overlay veth sch_netem ib_uverbs crc32_generic rdma_rxe)
note() { printf 'rdma vm [%3ds] %s\n' $SECONDS "$*" >&2; }
cannot() { note "$*"; exit 3; }

install_packages() {
  local missing=() package
  command -v dpkg-query >/dev/null ||
    cannot "no Debian packages here: install qemu-system-x86_64, libibverbs and perftest by hand"
  for package in "${PACKAGES[@]}"; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || cannot "as root run: apt-get install ${missing[*]}"
  note "installing ${missing[*]}"
  apt-get update -qq || cannot "apt-get update fails: is there a network?"
  DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends "${missing[@]}" \
    >/dev/null || cannot "apt-get cannot install ${missing[*]}"
}

# Unpacked, not installed: no boot loader or initramfs of the host gets touched. The cloud flavour
# of the kernel has neither rdma_rxe nor 9p.
get_kernel() {
  [ -e "$CACHE/vmlinux" ] && return
  local name
  mkdir -p "$CACHE"
  name=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
  if [ -z "$name" ]; then
    apt-get update -qq || cannot "apt-get update fails: is there a network?"
    name=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
  fi
  note "fetching $name"
  rm -rf "$CACHE"/{kernel,deb,initrd}
  mkdir -p "$CACHE"/{kernel,deb}
  (cd "$CACHE/deb" && apt-get download -qq "$name" 2>/dev/null) || cannot "cannot fetch $name"
  dpkg-deb --fsys-tarfile "$CACHE"/deb/*.deb | tar -x -C "$CACHE/kernel" --wildcards \
    './boot/vmlinuz*' './lib/modules/*/modules.*' './lib/modules/*/kernel/drivers/infiniband/core/*' \
    './lib/modules/*/kernel/drivers/infiniband/sw/rxe/*' './lib/modules/*/kernel/drivers/virtio/*' \
    './lib/modules/*/kernel/drivers/net/[dnv]*.ko' './lib/modules/*/kernel/crypto/crc32*' \
    './lib/modules/*/kernel/fs/[9cfno]*' './lib/modules/*/kernel/net/9p/*' \
    './lib/modules/*/kernel/net/core/*' './lib/modules/*/kernel/net/ipv[46]/*udp_tunnel*' \
    './lib/modules/*/kernel/net/sched/sch_netem*'
  rm -r "$CACHE/deb"
  # The kernel proper out of its self-unpacking image: unpacked here it boots 3 s earlier.
  python3 - "$CACHE"/kernel/boot/vmlinuz-* "$CACHE/vmlinux.new" <<'PYTHON'
import lzma, sys
image = open(sys.argv[1], "rb").read()
kernel = lzma.LZMADecompressor().decompress(image[image.index(b"\xfd7zXZ\0"):])
assert kernel[:4] == b"\x7fELF"
open(sys.argv[2], "wb").write(kernel)
PYTHON
  mv "$CACHE/vmlinux.new" "$CACHE/vmlinux"
}

build_initramfs() {
  local root=$CACHE/initrd.d version number=100 module
  [ "$CACHE/initrd" -nt "$0" ] && return
  version=$(ls "$CACHE/kernel/lib/modules")
  depmod -b "$CACHE/kernel" "$version" 2>/dev/null
  rm -rf "$root"
  mkdir -p "$root"/{modules,proc,sys,dev,lower,rw,new}
  cp /bin/busybox "$root/"
  # rdma_rxe needs crc32_generic, but does not say so.
  for module in "${MODULES[@]}"; do
    modprobe -d "$CACHE/kernel" -S "$version" --show-depends "$module"
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r module; do
    number=$((number + 1))
    cp "$module" "$root/modules/$number.ko"
  done
  cat >"$root/init" <<'INIT'
#!/busybox sh
b=/busybox
$b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev
$b mount -t tmpfs t /rw
for module in /modules/*.ko; do $b insmod $module; done
how=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $how,ro,cache=loose hostroot /lower
$b mkdir /rw/upper /rw/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work o /new
for d in proc sys dev; do $b mount --bind /$d /new/$d; done
$b mkdir -p /new/dev/shm /new/dev/pts
$b mount -t tmpfs t /new/dev/shm; $b mount -t devpts t /new/dev/pts; $b mount -t tmpfs t /new/run
for word in $($b cat /proc/cmdline); do case $word in out=*) out=${word#out=};; esac; done
$b mkdir -p /new$out; $b mount -t 9p -o $how,cache=none out /new$out
$b chroot /new /bin/bash $out/.job; echo $? >/new$out/.status
$b sync
echo -n x | $b dd of=/dev/port bs=1 seek=244 2>/dev/null  # port 0xf4: isa-debug-exit ends qemu
$b poweroff -f
INIT
  chmod +x "$root/init"
  (cd "$root" && find . | cpio -o -H newc --quiet | gzip -1 >"$CACHE/initrd.new")
  mv "$CACHE/initrd.new" "$CACHE/initrd"
  rm -r "$root"
}

write_job() {
  rm -f "$OUT/.status"
  {
    cat <<'GUEST'
PATH=/usr/sbin:/usr/bin:/sbin:/bin
ip link set lo up
stty -F /dev/console -onlcr
ulimit -l unlimited
nic() {  # DEVICE INTERFACE ADDRESS; an IP packet of 4,096 data bytes and its headers must fit
  echo 1 >/proc/sys/net/ipv4/conf/$2/accept_local
  echo 0 >/proc/sys/net/ipv4/conf/$2/rp_filter
  ip addr add $3/24 dev $2
  ip link set $2 mtu 4500 up
  rdma link add $1 type rxe netdev $2
}
echo 1 >/proc/sys/net/ipv4/conf/all/accept_local
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
ip link add v0 type veth peer name v1
nic rx0 v0 10.98.0.1
nic rx1 v1 10.98.0.2
for i in 1 2 3 4 5 6 7 8 9 10; do  # addresses reach the GID tables a moment later
  rdma link | grep -q 'state DOWN' || ! grep -q ffff /sys/class/infiniband/rx1/ports/1/gids/1 || break
  sleep 0.3
done
GUEST
    local name
    for name in PATH HOME LANG PYTHONPATH VIRTUAL_ENV CI; do
      if [ -n "${!name:-}" ]; then printf 'export %s=%q\n' $name "${!name}"; fi
    done
    printf 'export RDMA_VM_OUT=%q\ncd %q || exit 126\n' "$OUT" "$PWD"
    printf '%q ' "$@"
    echo
  } >"$OUT/.job"
}

boot() {
  local share=security_model=none rc=0
  timeout "${RDMA_VM_LIMIT:-600}" qemu-system-x86_64 -accel tcg,thread=multi,tb-size=512 -cpu max \
    -smp "${RDMA_VM_CPUS:-1}" -m 2560 -nodefaults -no-user-config -display none -no-reboot -serial stdio \
    -device isa-debug-exit,iobase=0xf4,iosize=1 -kernel "$CACHE/vmlinux" -initrd "$CACHE/initrd" \
    -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off tsc=reliable no_timer_check \
out=$OUT" \
    -fsdev local,id=r,path=/,readonly=on,multidevs=remap,$share \
    -device virtio-9p-pci,fsdev=r,mount_tag=hostroot \
    -fsdev local,id=o,path="$OUT",$share -device virtio-9p-pci,fsdev=o,mount_tag=out </dev/null ||
    rc=$?
  if [ ! -s "$OUT/.status" ]; then
    note "no status from the guest (qemu ended with $rc)"
    return 125
  fi
  return "$(cat "$OUT/.status")"
}

[ $# -gt 0 ] || { sed -n '2,16p' "$0"; exit 2; }
[ "$(uname -m)" = x86_64 ] || cannot "the guest is made for x86_64 hosts"
install_packages
get_kernel
build_initramfs
[ "$1" != --prepare ] || exit 0
OUT=$(realpath -m "${RDMA_VM_OUT:-$CACHE/out.$$}")
mkdir -p "$OUT"
[ -n "${RDMA_VM_OUT:-}" ] || trap 'rm -rf "$OUT"' EXIT
write_job "$@"
boot
