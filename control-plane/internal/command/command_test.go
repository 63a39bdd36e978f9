package command

import (
	"slices"
	"testing"
)

func TestPick(t *testing.T) {
	for _, test := range []struct {
		args []string
		name string
		rest []string
	}{
		{[]string{"/cache/bin/kube-apiserver", "--help"}, "kube-apiserver", []string{"--help"}},
		{[]string{"control-plane", "kube-scheduler", "-v=2"}, "kube-scheduler", []string{"-v=2"}},
		{[]string{"kube-controller-manager"}, "kube-controller-manager", []string{}},
		{[]string{"control-plane", "kubelet"}, "", nil},
		{[]string{"control-plane"}, "", nil},
		{nil, "", nil},
	} {
		picked, rest := Pick(test.args)
		name := ""
		if picked != nil {
			name = picked.Name()
		}
		if name != test.name || !slices.Equal(rest, test.rest) {
			t.Errorf("Pick(%q) = %q, %q; want %q, %q", test.args, name, rest, test.name, test.rest)
		}
	}
}
