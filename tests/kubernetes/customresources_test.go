package kubernetes

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
)

const definition = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: boats.test.skeg.local}
spec:
  group: test.skeg.local
  scope: Namespaced
  names: {plural: boats, singular: boat, kind: Boat}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec: {type: object, properties: {length: {type: integer, minimum: 1}}}
          status: {type: object, properties: {afloat: {type: boolean}}}
`

var boats = schema.GroupVersionResource{Group: "test.skeg.local", Version: "v1", Resource: "boats"}

func boat(namespace, name string, length int) string {
	return fmt.Sprintf("---\n{apiVersion: test.skeg.local/v1, kind: Boat, metadata: {name: %s, namespace: %s}, spec: {length: %d}}\n",
		name, namespace, length)
}

// TestCustomResources goes through the life of a definition and its objects. The first object of a new definition is made under a
// watch that was there before it: some stores lost exactly that event.
func TestCustomResources(t *testing.T) {
	c := sharedCluster(t)
	namespace := c.namespace(t)
	c.run(t, definition, "create", "--filename=-")
	c.run(t, "", "wait", "--for=condition=Established", "--timeout=30s", "crd/boats.test.skeg.local")
	objects := c.dynamic.Resource(boats).Namespace(namespace)
	var watcher watch.Interface
	eventually(t, 20*time.Second, func() (err error) {
		watcher, err = objects.Watch(t.Context(), metav1.ListOptions{})
		return err
	})
	defer watcher.Stop()

	c.run(t, boat(namespace, "first", 7), "create", "--filename=-")
	if event := nextEvent(t, watcher); event.Type != watch.Added || event.Object.(*unstructured.Unstructured).GetName() != "first" {
		t.Errorf("the first event is %v", event)
	}
	if _, problem, err := c.try(t, boat(namespace, "wrong", 0), "create", "--filename=-"); err == nil || !strings.Contains(problem, "Invalid") {
		t.Errorf("an object that its schema refuses: %v, %s", err, problem)
	}
	manifest := ""
	for i := range 11 {
		manifest += boat(namespace, fmt.Sprintf("boat-%02d", i), i+1)
	}
	c.run(t, manifest, "apply", "--filename=-")

	listed, token := 0, ""
	for {
		page, err := objects.List(t.Context(), metav1.ListOptions{Limit: 5, Continue: token})
		if err != nil {
			t.Fatal(err)
		}
		listed += len(page.Items)
		if token = page.GetContinue(); token == "" {
			break
		}
	}
	if listed != 12 {
		t.Errorf("%d of 12 are listed by pages", listed)
	}

	c.run(t, "", "--namespace="+namespace, "patch", "boat", "first", "--type=merge", `--patch={"spec":{"length":8}}`)
	if _, err := objects.Patch(t.Context(), "first", types.MergePatchType, []byte(`{"status":{"afloat":true}}`), metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	first, err := objects.Get(t.Context(), "first", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	length, _, _ := unstructured.NestedInt64(first.Object, "spec", "length")
	afloat, _, _ := unstructured.NestedBool(first.Object, "status", "afloat")
	if length != 8 || !afloat || first.GetGeneration() != 2 {
		t.Errorf("after two patches: length %d, afloat %t, generation %d", length, afloat, first.GetGeneration())
	}
	c.run(t, "", "--namespace="+namespace, "delete", "boat", "first")
	for {
		event := nextEvent(t, watcher)
		if event.Object.(*unstructured.Unstructured).GetName() == "first" && event.Type == watch.Deleted {
			break
		}
	}

	c.run(t, "", "delete", "crd", "boats.test.skeg.local", "--wait", "--timeout=50s")
	left, err := c.etcd.Get(t.Context(), "/registry/test.skeg.local/boats/", clientPrefix()...)
	if err != nil || left.Count != 0 {
		t.Errorf("after the deletion of the definition: %d objects, %v", left.Count, err)
	}
}
