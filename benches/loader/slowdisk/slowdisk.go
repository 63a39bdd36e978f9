// Package slowdisk mounts a folder whose every sync takes as long as it is told: a FUSE loopback that sleeps in fsync. Servers of
// any language meet it, for it is below their system calls.
package slowdisk

import (
	"context"
	"os"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// Mount serves the files of backing at mountPoint until the returned function unmounts it.
func Mount(backing, mountPoint string, syncTakes time.Duration) (unmount func(), err error) {
	for _, dir := range []string{backing, mountPoint} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	}
	// A minute of caching: nobody else writes below.
	timeout := time.Minute
	root := &fs.LoopbackRoot{Path: backing}
	root.NewNode = func(_ *fs.LoopbackRoot, _ *fs.Inode, _ string, _ *syscall.Stat_t) fs.InodeEmbedder {
		return &node{LoopbackNode: fs.LoopbackNode{RootData: root}, syncTakes: syncTakes}
	}
	root.RootNode = root.NewNode(root, nil, "", nil)
	server, err := fs.Mount(mountPoint, root.RootNode, &fs.Options{
		AttrTimeout: &timeout, EntryTimeout: &timeout,
		MountOptions: fuse.MountOptions{DirectMount: true, FsName: "slowdisk", MaxWrite: 1 << 20},
	})
	if err != nil {
		return nil, err
	}
	return func() {
		// A server that has just been killed may hold files for a moment more.
		for range 100 {
			if server.Unmount() == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	}, nil
}

type node struct {
	fs.LoopbackNode
	syncTakes time.Duration
}

var _ = (fs.NodeFsyncer)((*node)(nil))

// Fsync syncs an open file, or a directory, after the delay.
func (n *node) Fsync(ctx context.Context, handle fs.FileHandle, flags uint32) syscall.Errno {
	time.Sleep(n.syncTakes)
	if file, ok := handle.(fs.FileFsyncer); ok {
		return file.Fsync(ctx, flags)
	}
	return fs.OK
}
