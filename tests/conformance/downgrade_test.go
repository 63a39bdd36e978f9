package conformance

import (
	"syscall"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

const (
	validate = pb.DowngradeRequest_VALIDATE
	enable   = pb.DowngradeRequest_ENABLE
	cancel   = pb.DowngradeRequest_CANCEL
)

func downgrade(s *pair.Session, action pb.DowngradeRequest_DowngradeAction, version string) {
	s.Call("Maintenance/Downgrade", &pb.DowngradeRequest{Action: action, Version: version}, &pb.DowngradeResponse{})
}

// reached waits until cluster and storage have a version, which follow what was asked for.
func reached(s *pair.Session, version string) {
	s.Await("storage version "+version, func() bool {
		answer := &pb.StatusResponse{}
		return s.Quietly("Maintenance/Status", &pb.StatusRequest{}, answer) == nil && answer.StorageVersion == version
	})
	answer := &pb.StatusResponse{}
	s.Require(s.Quietly("Maintenance/Status", &pb.StatusRequest{}, answer) == nil, "status")
	s.Note("downgrade", answer.DowngradeInfo)
	s.HTTP("GET", "/version")
}

// The way to the version before, and back, with every version that it refuses.
func TestDowngrade(t *testing.T) {
	check(t, []scenario{{name: "downgrade/9-down-and-back", fresh: true, script: func(s *pair.Session) {
		versions := []string{"", "3", "3.", "3.5", "3.6", "3.6.0", "3.6.9", "3.6.0-rc.1", "3.6.0+x", "03.06.0", "v3.6", "3.6.x", "3.6.0.0",
			" 3.6", "3.6+x", "3.7", "3.7.3", "3.8", "4.6", "2.6", "-3.6", "3.99999999999999999999"}
		all := func() {
			for _, version := range versions {
				downgrade(s, validate, version)
			}
		}
		reached(s, "3.7.0")
		all()
		downgrade(s, cancel, "")
		downgrade(s, cancel, "nothing")
		downgrade(s, -1, "3.6")
		downgrade(s, 3, "3.6")
		for _, version := range []string{"3.7.0", "3.5.0", "x", ""} {
			downgrade(s, enable, version)
		}
		reached(s, "3.7.0")

		downgrade(s, enable, "3.6.4")
		reached(s, "3.6.0")
		all()
		downgrade(s, enable, "3.6.0")
		downgrade(s, enable, "3.5.0")
		s.Put(put("a", "under it"))
		s.Require(s.Store.Restart(syscall.SIGKILL) == nil, "restart")
		reached(s, "3.6.0")
		s.Range(get("a"))

		downgrade(s, cancel, "3.6.0")
		reached(s, "3.7.0")
		downgrade(s, cancel, "")
		all()
	}}})
}

// A snapshot of a cluster that goes down is one of the version before: that etcd restores it as it is.
func TestDowngradedSnapshot(t *testing.T) {
	stores := freshPair(t)
	for _, store := range []*pair.Store{stores.Etcd, stores.Skeg} {
		s := pair.NewSession(store)
		for _, request := range []*pb.DowngradeRequest{{Action: enable, Version: "3.6"}} {
			if err := s.Quietly("Maintenance/Downgrade", request, &pb.DowngradeResponse{}); err != nil {
				t.Fatal(store.Name, err)
			}
		}
		if err := s.Quietly("KV/Put", put("a", "1"), &pb.PutResponse{}); err != nil {
			t.Fatal(store.Name, err)
		}
		reached(s, "3.6.0")
		file := save(t, store)
		cluster := readBolt(t, file)["cluster"]
		if cluster["clusterVersion"] != "3.6.0" || cluster["downgrade"] != `{"target-version":"3.6.0","enabled":true}` {
			t.Errorf("%s: %q", store.Name, cluster)
		}
		older := pair.NewSession(restoreWith(t, "3.6", file))
		found := &pb.RangeResponse{}
		if err := older.Quietly("KV/Range", get("a"), found); err != nil || len(found.Kvs) != 1 {
			t.Errorf("%s: %v %v", store.Name, found, err)
		}
	}
}
