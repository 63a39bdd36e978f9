package main

import (
	"path/filepath"
	"strings"
	"testing"
)

const output = `{"Action":"pass","Package":"k8s.io/apiserver/pkg/storage/etcd3","Test":"TestA"}
{"Action":"skip","Package":"k8s.io/apiserver/pkg/storage/etcd3","Test":"TestB/x"}
{"Action":"pass","Package":"k8s.io/apiserver/pkg/storage/etcd3/metrics","Test":"TestC"}
{"Action":"pass","Package":"k8s.io/apiserver/pkg/storage/etcd3"}
`

func TestEveryDifferenceIsFound(t *testing.T) {
	found, failed, err := collect(strings.NewReader(output))
	if err != nil || len(failed) != 0 || len(found) != 3 {
		t.Fatalf("collected %v, %v, %v", found, failed, err)
	}
	list := filepath.Join(t.TempDir(), "expected.txt")
	if err := writeList(list, found, map[string]expectation{"etcd3.TestB/x": {"skip", "needs a second member"}}); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		change func(results, map[string]expectation)
		wants  string
	}{
		{"as listed", func(results, map[string]expectation) {}, ""},
		{"a failure", func(r results, _ map[string]expectation) { r["etcd3.TestA"] = "fail" }, "etcd3.TestA: fail, want pass"},
		{"a new skip", func(r results, _ map[string]expectation) { r["etcd3.TestA"] = "skip" }, "etcd3.TestA: skip, want pass"},
		{"a test that is gone", func(r results, _ map[string]expectation) { delete(r, "etcd3/metrics.TestC") }, "etcd3/metrics.TestC: did not run"},
		{"a new test", func(r results, _ map[string]expectation) { r["etcd3.TestD"] = "pass" }, "etcd3.TestD: pass, not in the list"},
		{"no reason", func(_ results, e map[string]expectation) { e["etcd3.TestB/x"] = expectation{"skip", ""} }, "etcd3.TestB/x: skipped without a reason"},
	} {
		results := results{}
		for name, result := range found {
			results[name] = result
		}
		expected, err := readList(list)
		if err != nil {
			t.Fatal(err)
		}
		test.change(results, expected)
		err = compare(results, expected)
		if (err == nil) != (test.wants == "") || (err != nil && !strings.Contains(err.Error(), test.wants)) {
			t.Errorf("%s: %v, want %q", test.name, err, test.wants)
		}
	}
}
