package kubernetes

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	crashRounds  = 4
	crashWriters = 8
)

// object is one config map with its only writer: the value it writes counts up, so an answer that was lost in a crash leaves
// the object at one of two values and no third.
type object struct {
	name      string
	revision  string // as the writer knows it
	attempted int
	answered  int
	revisions []int64 // of every answered write, in order
}

// checkCrash kills the store under kube-apiserver's writes, some times, and starts it again on its data. Every answered write must be
// there afterwards, no revision may have meant two things, and watches through all of it must have seen each event once and in order.
func checkCrash(t *testing.T) {
	c := ownCluster(t, "--etcd-compaction-interval=0")
	namespace := c.namespace(t)
	prefix := "/registry/configmaps/" + namespace + "/"
	start, err := c.etcd.Get(t.Context(), prefix, clientPrefix()...)
	if err != nil {
		t.Fatal(err)
	}
	from := start.Header.Revision + 1

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	seen := collect(ctx, c.etcd, prefix, from)
	objects := make([]*object, crashWriters)
	writing, stop := context.WithCancel(ctx)
	var writers sync.WaitGroup
	for i := range objects {
		objects[i] = &object{name: fmt.Sprintf("object-%d", i)}
		writers.Go(func() { objects[i].write(writing, c, namespace) })
	}
	for range crashRounds {
		time.Sleep(500*time.Millisecond + rand.N(time.Second))
		c.store.Kill()
		if err := c.store.Start(); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(time.Second)
	stop()
	writers.Wait()

	c.verifyObjects(t, namespace, objects)
	// The watch that went through the crashes must have seen what one over the whole history sees now. An object made last marks
	// the end of both.
	end := revisionOf(t, create(t, c, namespace, "end", nil).ResourceVersion)
	got := seen.until(t, end)
	want := collect(ctx, c.etcd, prefix, from).until(t, end)
	if len(got) != len(want) {
		t.Errorf("the watch saw %d events of %d", len(got), len(want))
	}
	for at := range min(len(got), len(want)) {
		if got[at] != want[at] {
			t.Fatalf("event %d was seen as %+v, history says %+v", at, got[at], want[at])
		}
	}
	// kube-apiserver's cache agrees with the store.
	eventually(t, 30*time.Second, func() error {
		cached, err := c.client.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return err
		}
		for _, item := range cached.Items {
			for _, object := range objects {
				if item.Name == object.name && item.ResourceVersion != object.revision {
					return fmt.Errorf("%s is cached at %s, stored at %s", item.Name, item.ResourceVersion, object.revision)
				}
			}
		}
		return nil
	})
	if state := c.plane.APIServer().State(); state != nil {
		t.Errorf("kube-apiserver ended: %s\n%s", state, c.plane.APIServer().LogTail(30))
	}
}

// write creates the object and updates it until the context ends.
func (o *object) write(ctx context.Context, c *cluster, namespace string) {
	maps := c.client.CoreV1().ConfigMaps(namespace)
	for ctx.Err() == nil {
		o.attempted++
		next := &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: o.name, ResourceVersion: o.revision},
			Data:       map[string]string{"value": strconv.Itoa(o.attempted)},
		}
		var made *corev1.ConfigMap
		var err error
		// The call outlives ctx, so that its answer is always known or its loss counted.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		if o.revision == "" {
			made, err = maps.Create(call, next, metav1.CreateOptions{})
		} else {
			made, err = maps.Update(call, next, metav1.UpdateOptions{})
		}
		cancel()
		if err == nil {
			o.answered, o.revision = o.attempted, made.ResourceVersion
			revision, _ := strconv.ParseInt(made.ResourceVersion, 10, 64) // 0, if it were no number, is found out of order
			o.revisions = append(o.revisions, revision)
			continue
		}
		time.Sleep(50 * time.Millisecond)
		o.reread(c, namespace)
	}
}

// reread finds out how a write ended whose answer was lost.
func (o *object) reread(c *cluster, namespace string) {
	for range 200 {
		call, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		current, err := c.client.CoreV1().ConfigMaps(namespace).Get(call, o.name, metav1.GetOptions{})
		cancel()
		if err == nil {
			o.revision = current.ResourceVersion
			return
		}
		if errors.IsNotFound(err) && o.answered == 0 {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// verifyObjects compares what is stored with what was answered.
func (c *cluster) verifyObjects(t *testing.T, namespace string, objects []*object) {
	t.Helper()
	list, err := c.client.CoreV1().ConfigMaps(namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stored := map[string]corev1.ConfigMap{}
	for _, item := range list.Items {
		stored[item.Name] = item
	}
	answered, used := 0, map[int64]string{}
	for _, object := range objects {
		answered += len(object.revisions)
		item := stored[object.name]
		value, err := strconv.Atoi(item.Data["value"])
		if err != nil || value < object.answered || value > object.attempted {
			t.Errorf("%s holds %q; the last answered write is %d, the last attempted %d", object.name, item.Data["value"], object.answered, object.attempted)
		}
		object.revision = item.ResourceVersion
		before := int64(0)
		for _, revision := range object.revisions {
			if revision <= before {
				t.Errorf("%s was written at %d after %d", object.name, revision, before)
			}
			before = revision
			if other, twice := used[revision]; twice {
				t.Errorf("revision %d was given to %s and to %s", revision, other, object.name)
			}
			used[revision] = object.name
		}
	}
	if answered < crashRounds*crashWriters {
		t.Errorf("only %d writes were answered: this shows nothing", answered)
	}
	t.Logf("%d writes were answered through %d crashes", answered, crashRounds)
}

// seenEvent is an event as far as two views of one history can be compared.
type seenEvent struct {
	key      string
	revision int64
	value    string
}

// collected gathers the events of one watch.
type collected struct {
	mutex   sync.Mutex
	events  []seenEvent
	failure error
}

// collect watches a prefix as kube-apiserver does, until the context ends; the client resumes it after each crash.
func collect(ctx context.Context, client *clientv3.Client, prefix string, from int64) *collected {
	seen := &collected{}
	watch := client.Watch(clientv3.WithRequireLeader(ctx), prefix,
		clientv3.WithPrefix(), clientv3.WithRev(from), clientv3.WithPrevKV(), clientv3.WithProgressNotify())
	go func() {
		for response := range watch {
			seen.mutex.Lock()
			if err := response.Err(); err != nil {
				seen.failure = err
			}
			for _, event := range response.Events {
				seen.events = append(seen.events, seenEvent{string(event.Kv.Key), event.Kv.ModRevision, string(event.Kv.Value)})
			}
			seen.mutex.Unlock()
		}
	}()
	return seen
}

// until waits for the event of a revision and returns all up to it.
func (c *collected) until(t *testing.T, revision int64) []seenEvent {
	t.Helper()
	var events []seenEvent
	eventually(t, 30*time.Second, func() error {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		if c.failure != nil {
			t.Fatal(c.failure)
		}
		events = slices.Clone(c.events)
		if len(events) == 0 || events[len(events)-1].revision < revision {
			return fmt.Errorf("the watch has seen %d events, not yet the one of revision %d", len(events), revision)
		}
		return nil
	})
	return events
}
