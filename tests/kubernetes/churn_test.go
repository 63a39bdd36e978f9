package kubernetes

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// checkChurn writes for a while, under compaction each ten seconds, while kube-apiserver compares each cache with the store at the
// cache's revision each few seconds; one difference would end it. CHURN sets how long (thirty minutes by hand).
func checkChurn(t *testing.T) {
	t.Parallel()
	length := 25 * time.Second
	if text, set := os.LookupEnv("CHURN"); set {
		var err error
		if length, err = time.ParseDuration(text); err != nil {
			t.Fatal(err)
		}
	}
	c := sharedCluster(t)
	namespace := c.namespace(t)
	maps := c.client.CoreV1().ConfigMaps(namespace)
	checks := func(status string) float64 {
		return c.metric(t, "apiserver_storage_consistency_checks_total", `status="`+status+`"`, `resource="configmaps"`)
	}
	before := checks("success")
	ctx, cancel := context.WithTimeout(t.Context(), length)
	defer cancel()
	for i := 0; ctx.Err() == nil; i++ {
		// An object lives for twenty rounds and is updated in the middle of its life.
		create(t, c, namespace, fmt.Sprintf("churn-%d", i), nil)
		if i >= 10 {
			if _, err := maps.Update(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("churn-%d", i-10)},
				Data: map[string]string{"i": fmt.Sprint(i)}}, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if i >= 20 {
			if err := maps.Delete(t.Context(), fmt.Sprintf("churn-%d", i-20), metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	if passed := checks("success") - before; passed < 2 {
		t.Errorf("%v checks of config maps passed in %s", passed, length)
	}
	if failed := c.metric(t, "apiserver_storage_consistency_checks_total", `status="failure"`); failed != 0 {
		t.Errorf("%v consistency checks failed", failed)
	}
	if state := c.plane.APIServer().State(); state != nil {
		t.Errorf("kube-apiserver ended: %s\n%s", state, c.plane.APIServer().LogTail(30))
	}
}
