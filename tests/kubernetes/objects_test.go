package kubernetes

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	applyv1 "k8s.io/client-go/applyconfigurations/core/v1"
)

func TestProbes(t *testing.T) {
	c := sharedCluster(t)
	ready := c.get(t, "/readyz?verbose")
	for _, check := range []string{"etcd", "etcd-readiness"} {
		if !strings.Contains(ready, "[+]"+check+" ok") {
			t.Errorf("/readyz does not list %s as ok:\n%s", check, ready)
		}
	}
	for _, path := range []string{"/livez/etcd", "/healthz/etcd"} {
		if answer := c.get(t, path); answer != "ok" {
			t.Errorf("%s = %q", path, answer)
		}
	}
	if size := c.metric(t, "apiserver_storage_size_bytes"); size <= 0 {
		t.Errorf("the store's size is %v", size)
	}
}

func TestNamespaces(t *testing.T) {
	c := sharedCluster(t)
	c.run(t, "", "create", "namespace", "lifecycle")
	if _, problem, err := c.try(t, "", "create", "namespace", "lifecycle"); err == nil || !strings.Contains(problem, "AlreadyExists") {
		t.Errorf("creating it twice: %v, %s", err, problem)
	}
	c.run(t, "", "label", "namespace", "lifecycle", "purpose=test")
	if names := c.run(t, "", "get", "namespaces", "--selector=purpose=test", "--output=name"); names != "namespace/lifecycle\n" {
		t.Errorf("listing by label: %q", names)
	}
	c.run(t, "", "--namespace=lifecycle", "create", "configmap", "inside", "--from-literal=a=1")
	// The controller manager fills and finalizes namespaces: these are its watches and writes.
	eventually(t, 20*time.Second, func() error {
		_, err := c.client.CoreV1().ServiceAccounts("lifecycle").Get(t.Context(), "default", metav1.GetOptions{})
		return err
	})
	c.run(t, "", "delete", "namespace", "lifecycle", "--wait", "--timeout=50s")
	left, err := c.etcd.Get(t.Context(), "/registry/configmaps/lifecycle/inside")
	if err != nil || left.Count != 0 {
		t.Errorf("after the deletion of its namespace: %d keys, %v", left.Count, err)
	}
}

func TestConfigMapPages(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	maps := c.client.CoreV1().ConfigMaps(namespace)
	names := []string{}
	for i := range 25 {
		name := fmt.Sprintf("page-%02d", i)
		names = append(names, name)
		create(t, c, namespace, name, map[string]string{"i": name})
	}
	listed, remaining, token, pinned := []string{}, []int64{}, "", ""
	for {
		page, err := maps.List(t.Context(), metav1.ListOptions{Limit: 10, Continue: token, LabelSelector: ""})
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range page.Items {
			if strings.HasPrefix(item.Name, "page-") {
				listed = append(listed, item.Name)
			}
		}
		if pinned == "" {
			pinned = page.ResourceVersion
			// Pages that follow show what the first did, whatever is written meanwhile.
			create(t, c, namespace, "page-99", nil)
			if err := maps.Delete(t.Context(), "page-24", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		} else if page.ResourceVersion != pinned {
			t.Errorf("a page at %s follows one at %s", page.ResourceVersion, pinned)
		}
		if page.RemainingItemCount != nil {
			remaining = append(remaining, *page.RemainingItemCount)
		}
		if token = page.Continue; token == "" {
			break
		}
	}
	if !slices.Equal(listed, names) {
		t.Errorf("the pages hold %q", listed)
	}
	if !slices.IsSortedFunc(remaining, func(a, b int64) int { return int(b - a) }) || len(remaining) != 2 {
		t.Errorf("items remaining after each page: %v", remaining)
	}
	byKubectl := c.run(t, "", "--namespace="+namespace, "get", "configmaps", "--chunk-size=4", "--output=name")
	if count := strings.Count(byKubectl, "configmap/page-"); count != 25 {
		t.Errorf("kubectl lists %d of 25:\n%s", count, byKubectl)
	}
}

func TestConfigMapPatchesAndWatch(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	maps := c.client.CoreV1().ConfigMaps(namespace)
	start, err := maps.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	watcher, err := maps.Watch(t.Context(), metav1.ListOptions{ResourceVersion: start.ResourceVersion, FieldSelector: "metadata.name=watched"})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Stop()

	created := create(t, c, namespace, "watched", map[string]string{"a": "1"})
	c.run(t, "", "--namespace="+namespace, "patch", "configmap", "watched", "--type=merge", `--patch={"data":{"b":"2"}}`)
	if _, err := maps.Patch(t.Context(), "watched", types.JSONPatchType,
		[]byte(`[{"op":"test","path":"/data/b","value":"2"},{"op":"replace","path":"/data/a","value":"3"}]`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := maps.Apply(t.Context(), applyv1.ConfigMap("watched", namespace).WithData(map[string]string{"c": "4"}),
		metav1.ApplyOptions{FieldManager: "test"}); err != nil {
		t.Fatal(err)
	}
	// A patch that changes nothing writes nothing.
	same, err := maps.Patch(t.Context(), "watched", types.MergePatchType, []byte(`{"data":{"c":"4"}}`), metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c.run(t, "", "--namespace="+namespace, "delete", "configmap", "watched")

	want := []string{
		`ADDED {"a":"1"}`, `MODIFIED {"a":"1","b":"2"}`, `MODIFIED {"a":"3","b":"2"}`, `MODIFIED {"a":"3","b":"2","c":"4"}`,
		`DELETED {"a":"3","b":"2","c":"4"}`,
	}
	last, lastModified := revisionOf(t, start.ResourceVersion), ""
	for _, expected := range want {
		event := nextEvent(t, watcher)
		object := event.Object.(*corev1.ConfigMap)
		data, err := json.Marshal(object.Data)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%s %s", event.Type, data); got != expected {
			t.Fatalf("event %q, want %q", got, expected)
		}
		if event.Type == watch.Added && object.ResourceVersion != created.ResourceVersion {
			t.Errorf("the creation is seen at %s, was made at %s", object.ResourceVersion, created.ResourceVersion)
		}
		if revision := revisionOf(t, object.ResourceVersion); revision <= last {
			t.Errorf("an event at %d follows one at %d", revision, last)
		} else {
			last = revision
		}
		if event.Type == watch.Modified {
			lastModified = object.ResourceVersion
		}
	}
	if same.ResourceVersion != lastModified {
		t.Errorf("the empty patch is at %s, the write before it at %s", same.ResourceVersion, lastModified)
	}
}

func TestLargeConfigMap(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	for _, size := range []int{500_000, 1_000_000} {
		name := fmt.Sprintf("large-%d", size)
		create(t, c, namespace, name, map[string]string{"value": strings.Repeat("x", size)})
		got, err := c.client.CoreV1().ConfigMaps(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || len(got.Data["value"]) != size {
			t.Errorf("%s has %d bytes, %v", name, len(got.Data["value"]), err)
		}
	}
}

func TestStaleResourceVersion(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	maps := c.client.CoreV1().ConfigMaps(namespace)
	stale := create(t, c, namespace, "contended", map[string]string{"a": "1"})
	file, err := json.Marshal(stale)
	if err != nil {
		t.Fatal(err)
	}
	current := stale.DeepCopy()
	current.Data["a"] = "2"
	if _, err := maps.Update(t.Context(), current, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}

	if _, err := maps.Update(t.Context(), stale, metav1.UpdateOptions{}); !errors.IsConflict(err) {
		t.Errorf("updating a stale version: %v", err)
	}
	err = maps.Delete(t.Context(), "contended", metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{ResourceVersion: &stale.ResourceVersion}})
	if !errors.IsConflict(err) {
		t.Errorf("deleting a stale version: %v", err)
	}
	manifest := `{"apiVersion":"v1","kind":"ConfigMap",` + string(file[1:])
	if _, problem, err := c.try(t, manifest, "replace", "--filename=-"); err == nil || !strings.Contains(problem, "Conflict") {
		t.Errorf("kubectl replace of a stale version: %v, %s", err, problem)
	}
	got, err := maps.Get(t.Context(), "contended", metav1.GetOptions{})
	if err != nil || got.Data["a"] != "2" {
		t.Errorf("afterwards it holds %v, %v", got.Data, err)
	}
	// The client would wait and try again ten times.
	err = c.client.CoreV1().RESTClient().Get().MaxRetries(0).RequestURI(fmt.Sprintf(
		"/api/v1/namespaces/%s/configmaps?resourceVersionMatch=Exact&resourceVersion=%d", namespace, revisionOf(t, got.ResourceVersion)+1_000_000),
	).Do(t.Context()).Error()
	if !errors.IsTimeout(err) || !strings.Contains(err.Error(), "Too large resource version") {
		t.Errorf("listing at a future version: %v", err)
	}
}

// create makes a config map.
func create(t *testing.T, c *cluster, namespace, name string, data map[string]string) *corev1.ConfigMap {
	t.Helper()
	made, err := c.client.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data,
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return made
}

// nextEvent waits for one event.
func nextEvent(t *testing.T, watcher watch.Interface) watch.Event {
	t.Helper()
	select {
	case event, open := <-watcher.ResultChan():
		if !open {
			t.Fatal("the watch ended")
		}
		return event
	case <-time.After(30 * time.Second):
		t.Fatal("no event in 30 s")
	}
	return watch.Event{}
}
