package kubernetes

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// TestCompaction lets kube-apiserver's own compactor run (each ten seconds here) and wants everything that needs the history before
// it to be refused as expired: lists at a version, pages, watches.
func TestCompaction(t *testing.T) {
	t.Parallel()
	c := sharedCluster(t)
	namespace := c.namespace(t)
	maps := c.client.CoreV1().ConfigMaps(namespace)
	for i := range 4 {
		create(t, c, namespace, fmt.Sprintf("old-%d", i), nil)
	}
	page, err := maps.List(t.Context(), metav1.ListOptions{Limit: 2})
	if err != nil {
		t.Fatal(err)
	}
	old := page.ResourceVersion
	create(t, c, namespace, "new", nil)

	lock := func() (int64, int64) {
		got, err := c.etcd.Get(t.Context(), "compact_rev_key")
		if err != nil || len(got.Kvs) != 1 {
			t.Fatalf("reading the compactor's lock: %v", err)
		}
		revision, err := strconv.ParseInt(string(got.Kvs[0].Value), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return revision, got.Kvs[0].Version
	}
	eventually(t, 40*time.Second, func() error {
		_, err := c.etcd.Get(t.Context(), "any", clientv3.WithRev(revisionOf(t, old)))
		if err != rpctypes.ErrCompacted {
			return fmt.Errorf("reading at %s: %v", old, err)
		}
		return nil
	})
	// The lock names the revision that the next round will compact to, and counts the rounds.
	if revision, version := lock(); revision <= revisionOf(t, old) || version < 2 {
		t.Errorf("the lock is at version %d and names revision %d; %s is compacted", version, revision, old)
	}

	// kube-apiserver drops its snapshots of that time each fifteen seconds.
	eventually(t, 60*time.Second, func() error {
		_, err := maps.List(t.Context(), metav1.ListOptions{ResourceVersion: old, ResourceVersionMatch: metav1.ResourceVersionMatchExact})
		if !errors.IsResourceExpired(err) && !errors.IsGone(err) {
			return fmt.Errorf("listing at %s: %v", old, err)
		}
		return nil
	})
	_, err = maps.List(t.Context(), metav1.ListOptions{Limit: 2, Continue: page.Continue})
	status, isStatus := err.(*errors.StatusError)
	if !isStatus || !errors.IsResourceExpired(err) || status.ErrStatus.Code != 410 || status.ErrStatus.Continue == "" {
		t.Fatalf("continuing from %s: %v", old, err)
	}
	// The refusal hands out a token that goes on at the latest version.
	rest, err := maps.List(t.Context(), metav1.ListOptions{Continue: status.ErrStatus.Continue})
	if err != nil || !strings.HasPrefix(rest.Items[len(rest.Items)-1].Name, "old-") {
		t.Errorf("continuing with the new token: %v, %v", rest, err)
	}

	// Events have no cache: a watch of them is a watch of the store.
	watcher, err := c.client.CoreV1().Events(namespace).Watch(t.Context(), metav1.ListOptions{ResourceVersion: old})
	if err == nil {
		defer watcher.Stop()
		event := nextEvent(t, watcher)
		err = errors.FromObject(event.Object)
		if event.Type != watch.Error {
			t.Errorf("watching events from %s: %v", old, event)
		}
	}
	if !errors.IsResourceExpired(err) && !errors.IsGone(err) {
		t.Errorf("watching events from %s: %v", old, err)
	}
}

// TestEventsExpire wants an event to live as long as --event-ttl promises, to be deleted soon after it with its last state shown to
// watchers, and its lease to be gone.
func TestEventsExpire(t *testing.T) {
	t.Parallel()
	c := sharedCluster(t)
	namespace := c.namespace(t)
	events := c.client.CoreV1().Events(namespace)
	watcher, err := events.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Stop()
	start := time.Now()
	if _, err := events.Create(t.Context(), &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "short"},
		InvolvedObject: corev1.ObjectReference{Kind: "Namespace", Name: namespace, Namespace: namespace},
		Reason:         "Tested", Message: "soon gone", Type: corev1.EventTypeNormal,
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	stored, err := c.etcd.Get(t.Context(), "/registry/events/"+namespace+"/short")
	if err != nil || len(stored.Kvs) != 1 || stored.Kvs[0].Lease == 0 {
		t.Fatalf("the stored event: %v, %v", stored, err)
	}
	lease := clientv3.LeaseID(stored.Kvs[0].Lease)
	granted, err := c.etcd.TimeToLive(t.Context(), lease, clientv3.WithAttachedKeys())
	if err != nil || granted.GrantedTTL < int64(eventTTL.Seconds()) || !slicesContain(granted.Keys, string(stored.Kvs[0].Key)) {
		t.Errorf("its lease: %v, %v", granted, err)
	}

	if event := nextEvent(t, watcher); event.Type != watch.Added {
		t.Fatalf("instead of its creation: %v", event)
	}
	gone := nextEvent(t, watcher)
	lived := time.Since(start)
	if object, isEvent := gone.Object.(*corev1.Event); gone.Type != watch.Deleted || !isEvent || object.Message != "soon gone" {
		t.Errorf("instead of its deletion: %v", gone)
	}
	if lived < eventTTL-100*time.Millisecond {
		t.Errorf("it lived %s of %s", lived, eventTTL)
	}
	if _, err := events.Get(t.Context(), "short", metav1.GetOptions{}); !errors.IsNotFound(err) {
		t.Errorf("reading it afterwards: %v", err)
	}
	eventually(t, 5*time.Second, func() error {
		left, err := c.etcd.Leases(t.Context())
		if err != nil {
			return err
		}
		for _, status := range left.Leases {
			if status.ID == lease {
				return fmt.Errorf("lease %x is still listed", lease)
			}
		}
		return nil
	})
}

// TestMasterLease wants the key by which kube-apiserver announces itself, under a lease that it renews by a new grant each ten seconds.
func TestMasterLease(t *testing.T) {
	t.Parallel()
	c := sharedCluster(t)
	read := func() (int64, int64) {
		got, err := c.etcd.Get(t.Context(), "/registry/masterleases/"+advertised)
		if err != nil || len(got.Kvs) != 1 || got.Kvs[0].Lease == 0 {
			t.Fatalf("the master lease: %v, %v", got, err)
		}
		return got.Kvs[0].ModRevision, got.Kvs[0].Lease
	}
	revision, _ := read()
	eventually(t, 30*time.Second, func() error {
		if later, _ := read(); later == revision {
			return fmt.Errorf("it is still as written at %d", revision)
		}
		return nil
	})
	endpoints := c.run(t, "", "--namespace=default", "get", "endpointslices", "--output=jsonpath={.items[*].endpoints[*].addresses}")
	if !strings.Contains(endpoints, advertised) {
		t.Errorf("the endpoints of kubernetes: %s", endpoints)
	}
}

func slicesContain(keys [][]byte, key string) bool {
	for _, each := range keys {
		if string(each) == key {
			return true
		}
	}
	return false
}
