package kubernetes

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"skeg.local/boot"
)

const (
	membersSize    = 3
	membersWriters = 9
)

// TestMembers runs a kube-apiserver on each of three members and kills one member after the other under writes through all of them: the control
// plane goes on, no answered write is lost, and no list is stale.
func TestMembers(t *testing.T) {
	folder := t.TempDir()
	members, planes := startMembers(t, folder)
	namespace := planes[0].namespace(t)

	writing, stop := context.WithCancel(t.Context())
	defer stop()
	var writers sync.WaitGroup
	objects := make([]*object, membersWriters)
	for at := range objects {
		objects[at] = &object{name: fmt.Sprintf("object-%d", at)}
		plane := planes[at%membersSize]
		writers.Go(func() { objects[at].write(writing, plane, namespace) })
	}
	// Each in turn, so that the leader is among them; then the one that leads by now.
	for round := range membersSize + 1 {
		time.Sleep(time.Second)
		killed := round % membersSize
		if round == membersSize {
			killed = leaderOf(t, planes)
		}
		members[killed].Kill()
		answeredBy(t, planes[(killed+1)%membersSize], namespace, round)
		if err := members[killed].Start(); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(time.Second)
	stop()
	writers.Wait()

	last := create(t, planes[0], namespace, "last", nil)
	for at, plane := range planes {
		plane.verifyObjects(t, namespace, objects)
		list, err := plane.client.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if revisionOf(t, list.ResourceVersion) < revisionOf(t, last.ResourceVersion) {
			t.Errorf("kube-apiserver %d lists at %s, after a write at %s was answered", at, list.ResourceVersion, last.ResourceVersion)
		}
		if state := plane.plane.APIServer().State(); state != nil {
			t.Errorf("kube-apiserver %d ended: %s\n%s", at, state, plane.plane.APIServer().LogTail(30))
		}
	}
}

// startMembers starts the members and a kube-apiserver on each, which knows no other.
func startMembers(t *testing.T, folder string) ([]*boot.Store, []*cluster) {
	t.Helper()
	binaries := os.Getenv("KUBERNETES_BIN")
	members, err := boot.NewCluster(os.Getenv("STORE_BIN"), folder, membersSize)
	if err == nil {
		err = boot.StartAll(members)
	}
	t.Cleanup(func() {
		for _, member := range members {
			member.Kill()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	planes := make([]*cluster, membersSize)
	start := func(at int) error {
		planes[at] = &cluster{store: members[at], folder: folder, kubectl: filepath.Join(binaries, "kubectl")}
		plane, err := boot.Start(boot.Options{
			Binaries:       binaries,
			Folder:         filepath.Join(folder, fmt.Sprintf("plane-%d", at)),
			Stores:         []string{members[at].URL()},
			APIServerFlags: []string{"--etcd-compaction-interval=0"},
		})
		if err != nil {
			return err
		}
		planes[at].plane = plane
		t.Cleanup(func() { _ = plane.Stop() })
		return planes[at].connect()
	}
	// The first one fills the empty store.
	if err := start(0); err != nil {
		t.Fatal(err)
	}
	failures := make(chan error, membersSize)
	for at := 1; at < membersSize; at++ {
		go func() { failures <- start(at) }()
	}
	for range membersSize - 1 {
		if err := <-failures; err != nil {
			t.Fatal(err)
		}
	}
	return members, planes
}

// leaderOf says which member leads.
func leaderOf(t *testing.T, planes []*cluster) int {
	t.Helper()
	found := -1
	eventually(t, 30*time.Second, func() error {
		for at, plane := range planes {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			status, err := plane.etcd.Status(ctx, plane.store.URL())
			cancel()
			if err == nil && status.Leader == status.Header.MemberId {
				found = at
				return nil
			}
		}
		return fmt.Errorf("no member leads")
	})
	return found
}

// answeredBy waits until a write through a kube-apiserver is answered.
func answeredBy(t *testing.T, c *cluster, namespace string, round int) {
	t.Helper()
	started := time.Now()
	eventually(t, 60*time.Second, func() error {
		next := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: fmt.Sprintf("round-%d-", round)}}
		_, err := c.client.CoreV1().ConfigMaps(namespace).Create(t.Context(), next, metav1.CreateOptions{})
		return err
	})
	t.Logf("round %d: a write was answered %s after the kill", round, time.Since(started))
}
