package kubernetes

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

func clientPrefix() []clientv3.OpOption {
	return []clientv3.OpOption{clientv3.WithPrefix(), clientv3.WithCountOnly()}
}

// TestConsistentLists writes config maps and lists secrets: the cache of secrets sees no event, so each list waits until the
// store says by a progress notification that there is none to wait for.
func TestConsistentLists(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	served := func(labels ...string) float64 {
		return c.metric(t, "apiserver_watch_cache_consistent_read_total", append(labels, `resource="secrets"`)...)
	}
	before, failed := served(`fallback="false"`, `success="true"`), served(`success="false"`)+served(`fallback="true"`)
	const rounds = 20
	times := make([]time.Duration, 0, rounds)
	for i := range rounds {
		written := create(t, c, namespace, fmt.Sprintf("progress-%02d", i), nil)
		start := time.Now()
		list, err := c.client.CoreV1().Secrets(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		times = append(times, time.Since(start))
		if revisionOf(t, list.ResourceVersion) < revisionOf(t, written.ResourceVersion) {
			t.Errorf("a list at %s follows a write at %s", list.ResourceVersion, written.ResourceVersion)
		}
	}
	if after := served(`fallback="false"`, `success="true"`); after-before < rounds {
		t.Errorf("%v of %d lists were served from the cache", after-before, rounds)
	}
	if after := served(`success="false"`) + served(`fallback="true"`); after != failed {
		t.Errorf("%v lists fell back to the store", after-failed)
	}
	// kube-apiserver asks each 100 ms and gives up after three seconds.
	slices.Sort(times)
	if median := times[rounds/2]; median > time.Second {
		t.Errorf("the median list took %s", median)
	}
}

// TestWatchList starts a watch with the list in front (WatchList), as informers do now, and wants the bookmark that ends the list
// and one later that moves on without events.
func TestWatchList(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	for i := range 3 {
		create(t, c, namespace, fmt.Sprintf("listed-%d", i), nil)
	}
	yes, seconds := true, int64(6)
	watcher, err := c.client.CoreV1().Secrets(namespace).Watch(t.Context(), metav1.ListOptions{
		SendInitialEvents: &yes, AllowWatchBookmarks: true, TimeoutSeconds: &seconds,
		ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Stop()
	end := nextEvent(t, watcher)
	secret, isSecret := end.Object.(*corev1.Secret)
	if end.Type != watch.Bookmark || !isSecret || secret.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Fatalf("instead of the bookmark that ends the list: %v", end)
	}
	// Nothing happens to secrets, yet the bookmark before the end of the watch stands at this write or after it.
	written := create(t, c, namespace, "later", nil)
	eventually(t, 10*time.Second, func() error {
		bookmark := nextEvent(t, watcher)
		if bookmark.Type != watch.Bookmark {
			return fmt.Errorf("an event for secrets: %v", bookmark)
		}
		at := bookmark.Object.(*corev1.Secret).ResourceVersion
		if revisionOf(t, at) < revisionOf(t, written.ResourceVersion) {
			return fmt.Errorf("the bookmark is at %s, the write at %s", at, written.ResourceVersion)
		}
		return nil
	})
}

// TestRangeStreamIsUsed wants kube-apiserver to have filled its caches by RangeStream: if the store refused it even once, whole lists
// would come by pages for ten minutes.
func TestRangeStreamIsUsed(t *testing.T) {
	c := sharedCluster(t)
	if streamed := c.metric(t, "etcd_requests_total", `operation="listStream"`); streamed < 50 {
		t.Errorf("%v lists were streamed", streamed)
	}
	if failed := c.metric(t, "etcd_request_errors_total", `operation="listStream"`); failed != 0 {
		t.Errorf("%v streamed lists failed", failed)
	}
	if size := c.metric(t, "apiserver_storage_list_duration_seconds_count", `streamed="true"`, `resource="configmaps"`); size == 0 {
		t.Error("no list of config maps was streamed")
	}
}

// TestWatchCacheRecovers stops kube-apiserver's process while the store goes on, and compacts what its watch has not been sent. When
// it runs again its watch is cancelled as compacted, and the cache must fill itself anew.
func TestWatchCacheRecovers(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	filled := func() float64 {
		return c.metric(t, "apiserver_watch_cache_initializations_total", `resource="configmaps"`)
	}
	before := filled()
	create(t, c, namespace, "large", map[string]string{"value": strings.Repeat("x", 900_000)})
	create(t, c, namespace, "last", map[string]string{"value": "1"})
	large := "/registry/configmaps/" + namespace + "/large"
	stored, err := c.etcd.Get(t.Context(), large)
	if err != nil || len(stored.Kvs) != 1 {
		t.Fatalf("reading the stored object: %v", err)
	}

	process := c.plane.APIServer()
	if err := process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	running := false
	resume := func() {
		if !running {
			running = true
			if err := process.Signal(syscall.SIGCONT); err != nil {
				t.Error(err)
			}
		}
	}
	defer resume()
	// The same bytes again are an update of the object. These are more than sockets and the store's buffers hold.
	var written int64
	for range 120 {
		put, err := c.etcd.Put(t.Context(), large, string(stored.Kvs[0].Value))
		if err != nil {
			t.Fatal(err)
		}
		written = put.Header.Revision
	}
	if _, err := c.etcd.Compact(t.Context(), written); err != nil {
		t.Fatal(err)
	}
	resume()

	recovered := ""
	eventually(t, 60*time.Second, func() error {
		got, err := c.client.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return err
		}
		for _, item := range got.Items {
			if item.Name == "large" && revisionOf(t, item.ResourceVersion) == written {
				recovered = got.ResourceVersion
				return nil
			}
		}
		return fmt.Errorf("the cache is at %s, the write at %d", got.ResourceVersion, written)
	})
	if after := filled(); after <= before {
		t.Errorf("the cache was filled %v times before, %v after: its watch was not cancelled", before, after)
	}
	// The watch goes on after it.
	watcher, err := c.client.CoreV1().ConfigMaps(namespace).Watch(t.Context(), metav1.ListOptions{
		ResourceVersion: recovered, FieldSelector: "metadata.name=last"})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Stop()
	c.run(t, "", "--namespace="+namespace, "patch", "configmap", "last", "--type=merge", `--patch={"data":{"value":"2"}}`)
	if event := nextEvent(t, watcher); event.Type != watch.Modified || event.Object.(*corev1.ConfigMap).Data["value"] != "2" {
		t.Errorf("after the recovery: %v", event)
	}
}
