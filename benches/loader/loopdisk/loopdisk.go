// Package loopdisk makes a small disk of its own for a server, whose every written byte is counted.
//
// The kernel's count per process (write_bytes in /proc/PID/io) does not serve: it adds the whole page-cache folio, up to megabytes on
// ext4, for each small write into it. A loop device counts what the file system really sent down, its journal included.
package loopdisk

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const (
	// sizeBytes is sparse: only what is written takes room.
	sizeBytes   = 8 << 30
	sectorBytes = 512
)

// Disk is a mounted ext4 file system on a loop device.
type Disk struct {
	// Path is where it is mounted.
	Path   string
	image  string
	device string
}

// Mount makes a disk under parent. It needs root.
func Mount(parent string) (*Disk, error) {
	disk := &Disk{Path: filepath.Join(parent, "disk"), image: filepath.Join(parent, "disk.img")}
	if err := os.MkdirAll(disk.Path, 0o700); err != nil {
		return nil, err
	}
	image, err := os.Create(disk.image)
	if err != nil {
		return nil, err
	}
	err = image.Truncate(sizeBytes)
	_ = image.Close()
	if err != nil {
		return nil, err
	}
	// Nothing is left for the kernel to initialise behind a measurement.
	if _, err = run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", disk.image); err != nil {
		return nil, err
	}
	if disk.device, err = run("losetup", "--find", "--show", disk.image); err != nil {
		return nil, err
	}
	if _, err = run("mount", "-t", "ext4", disk.device, disk.Path); err != nil {
		_, _ = run("losetup", "--detach", disk.device)
		return nil, err
	}
	return disk, nil
}

// WrittenBytes syncs the file system and returns what has been written to the device so far.
func (d *Disk) WrittenBytes() (int64, error) {
	syscall.Sync()
	text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(d.device), "stat"))
	if err != nil {
		return 0, err
	}
	// The seventh number is sectors written.
	fields := strings.Fields(string(text))
	if len(fields) < 7 {
		return 0, fmt.Errorf("%s has only %d counters", d.device, len(fields))
	}
	sectors, err := strconv.ParseInt(fields[6], 10, 64)
	return sectors * sectorBytes, err
}

// Remove unmounts the disk and removes its image.
func (d *Disk) Remove() {
	_, _ = run("umount", d.Path)
	_, _ = run("losetup", "--detach", d.device)
	_ = os.Remove(d.image)
}

func run(program string, arguments ...string) (string, error) {
	output, err := exec.Command(program, arguments...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %v: %w: %s", program, arguments, err, output)
	}
	return strings.TrimSpace(string(output)), nil
}
